"""Sums over replicas: non-blocking, in buckets of a flat buffer, half types added in float32.

Buckets of a device buffer go through pinned memory:

    bucket      0          1          2
    device      copy out   copy out   copy out                 outward stream
    MPI                    sum 0      sum 1      sum 2
    device                            copy back  copy back     inward stream

MPI matches collectives by the order in which each rank starts them. So every rank starts them in the order of the calls
and of the buckets, whichever copy is done first; the sum of a host buffer waits its turn as well.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Event
from mpipipe.comm.transport.staged import PinnedPool
from mpipipe.job import (
    Communicator,
    Request,
    cached,
    keep_forever,
    own,
    register_progress,
    runtime,
    unregister_progress,
)

BUCKET_BYTES = 32 << 20
BUFFERS = 3  # pinned buckets in use at once on one communicator: one on its way out, one summed, one on its way back
Range: TypeAlias = tuple[int, int]


class AllReduce:
    """An all-reduce under way; `Test()` is true once `flat`, one-dimensional, holds the sum over all ranks of `comm`.

    Every rank must start the sums on one communicator in the same order. `flat` must be left alone until the sum is
    there. On a GPU, the sum waits for work queued before, and work queued on the current stream after `Test()` was true
    finds the sum. Float16 and bfloat16 have no MPI type and too few bits to add in: they are converted to float32 and
    rounded once, at the end.
    """

    def __init__(self, comm: Communicator, flat: Array) -> None:
        self.queue: _Queue = cached(comm, "sums", lambda: _Queue(comm))
        self.sum: _HostSum | _DeviceSum = (_DeviceSum if arrays.is_device(flat) else _HostSum)(self.queue, flat)
        self.queue.add(self.sum)

    def Test(self) -> bool:
        """Whether the sum is there; lets all sums on the communicator advance."""
        self.queue.progress()
        return self.sum.finish()

    def progress(self) -> None:
        self.queue.progress()
        self.sum.poll()

    def Cancel(self) -> None:
        """Give up all sums on this communicator after a failure; nothing that MPI or the device may touch is freed."""
        self.queue.abort()


class _Queue:
    """The sums on one communicator, and the pinned buffers that they share.

    Buffers go to buckets in their order, so the first bucket that is not summed has one on every rank: no bucket waits
    for a later one.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.in_place = comm, runtime.library_of(comm).IN_PLACE
        # with collectives still to be started, in the order of the calls
        self.unstarted: deque[_HostSum | _DeviceSum] = deque()
        self.active: list[_DeviceSum] = []  # whose results are not back on the device
        self.pool = PinnedPool(BUFFERS * BUCKET_BYTES)
        self.returning: deque[tuple[Event, np.ndarray]] = deque()  # buffers whose content is on its way to the device

    @cached_property
    def streams(self) -> tuple[Any, Any]:
        return arrays.side_stream(), arrays.side_stream()

    def add(self, new: _HostSum | _DeviceSum) -> None:
        """Queue a sum, and start what can be started."""
        self.unstarted.append(new)
        if isinstance(new, _DeviceSum):  # it may hold buckets back that peers wait for
            register_progress(self)
        self.progress()

    def progress(self) -> None:
        """Let all sums advance; never waits."""
        while self.unstarted and self.unstarted[0].start():
            self.unstarted.popleft()
        if self.active:
            for each in self.active:
                each.poll()
            self.active = [each for each in self.active if not each.complete]
            if not self.active and not self.unstarted:
                unregister_progress(self)

    def take_buffer(self, nbytes: int) -> np.ndarray | None:
        """Pinned bytes, or None while all buffers are in use."""
        while self.returning and arrays.is_done(self.returning[0][0]):
            self.pool.give(self.returning.popleft()[1])
        return self.pool.take(nbytes, first=self.pool.used == 0)

    def abort(self) -> None:
        """After a failure: advance no more, and free nothing."""
        unregister_progress(self)
        keep_forever((self.unstarted, self.active, self.pool, self.returning))
        self.unstarted, self.active = deque(), []

    def close(self) -> None:
        """The communicator is freed: its sums are over."""
        unregister_progress(self)
        for event, _ in self.returning:
            event.synchronize()
        self.returning.clear()


def _buckets(size: int, itemsize: int) -> list[Range]:
    """Ranges of elements of at most BUCKET_BYTES, the same for host and device buffers."""
    count = max(1, BUCKET_BYTES // itemsize)
    return [(start, min(start + count, size)) for start in range(0, size, count)]


class _HostSum:
    """The sum of a host buffer; half types are summed in a float32 copy."""

    def __init__(self, queue: _Queue, flat: np.ndarray) -> None:
        self.queue, self.flat = queue, flat
        self.summed = flat if flat.dtype.itemsize >= 4 else flat.astype(np.float32)
        self.requests: list[Request] | None = None

    def start(self) -> bool:
        """Hand MPI what can be handed on; true once it has everything."""
        comm, in_place, summed = self.queue.comm, self.queue.in_place, self.summed
        buckets = _buckets(summed.size, summed.itemsize)
        self.requests = [own(comm.Iallreduce(in_place, summed[start:stop])) for start, stop in buckets]
        return True

    def poll(self) -> None:
        self.finish()

    def finish(self) -> bool:
        """Whether the sum is in its place, for whatever comes next on the current stream."""
        if self.requests is None:
            return False
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        if self.requests:
            return False
        if self.summed is not self.flat:
            self.flat[...] = self.summed
            self.summed = self.flat
        return True


class _DeviceSum:
    """The sum of a device buffer. MPI adds up `sums`: `values` of a bucket in pinned memory, or float32 of halves."""

    def __init__(self, queue: _Queue, flat: DeviceArray) -> None:
        self.queue, self.flat, self.ready = queue, flat, arrays.record()
        self.outward, self.inward = queue.streams
        self.buckets = deque(_buckets(flat.size, max(4, flat.itemsize)))
        # (event, buffer, values, range) of each bucket on its way to the host
        self.copying: deque[tuple[Event, np.ndarray, np.ndarray, Range]] = deque()
        # (request, buffer, values, sums, range) of each bucket that MPI has
        self.flying: deque[tuple[Request, np.ndarray, np.ndarray, np.ndarray, Range]] = deque()
        self.arrived: Event | None = None  # after the last copy back
        with self.outward:
            arrays.wait_for(self.ready)
        queue.active.append(self)

    def start(self) -> bool:
        while self.copying and arrays.is_done(self.copying[0][0]):
            _, buffer, values, bounds = self.copying.popleft()
            sums = values if values.itemsize >= 4 else values.astype(np.float32)
            request = own(self.queue.comm.Iallreduce(self.queue.in_place, sums))
            self.flying.append((request, buffer, values, sums, bounds))
        while self.buckets:
            start, stop = self.buckets[0]
            nbytes = (stop - start) * self.flat.itemsize
            taken = self.queue.take_buffer(nbytes)
            if taken is None:
                break
            self.buckets.popleft()
            with self.outward:
                arrays.copy_to_host(taken[:nbytes], self.flat[start:stop])
                self.copying.append((arrays.record(), taken, taken[:nbytes].view(self.flat.dtype), (start, stop)))
        return not self.buckets and not self.copying

    def poll(self) -> None:
        while self.flying and self.flying[0][0].Test():
            _, buffer, values, sums, (start, stop) = self.flying.popleft()
            if sums is not values:
                values[...] = sums
            with self.inward:
                arrays.copy_to_device(self.flat[start:stop], values.view(np.uint8))
                self.arrived = arrays.record()
            self.queue.returning.append((self.arrived, buffer))

    @property
    def complete(self) -> bool:
        """Whether all buckets are summed, and the last copy back is queued."""
        return not (self.buckets or self.copying or self.flying)

    def finish(self) -> bool:
        if not self.complete:
            return False
        if self.arrived is not None:
            arrays.wait_for(self.arrived)
        return True
