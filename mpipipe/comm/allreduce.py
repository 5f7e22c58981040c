"""Sums and gathers over replicas: in buckets of a flat buffer, halves added in float32.

Buckets of a device buffer go through pinned memory:

    bucket      0          1          2
    device      copy out   copy out   copy out                 outward stream
    MPI                    sum 0      sum 1      sum 2
    device                            copy back  copy back     inward stream

MPI matches collectives by the order in which each rank starts them. So every rank starts them in
the order of the calls and of the buckets, whichever copy is done first; the sum of a host buffer
waits its turn as well. Gathers go the same way: in place of adding, each rank gives of a bucket the
part that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Event
from mpipipe.comm.transport.host import RequestGroup
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
GATHERED = 1 << 30  # elements of a host buffer that MPI gathers at once: it counts with 32 bits
# Pinned buckets in use at once on one communicator: one on its way out, one summed, one on its way
# back.
BUFFERS = 3
Range: TypeAlias = tuple[int, int]


class AllReduce:
    """An all-reduce under way; `Test()` is true once `flat` holds the sum over all ranks.

    `flat` has one dimension.

    Every rank must start the sums on one communicator in the same order. `flat` must be left alone
    until the sum is there. On a GPU, the sum waits for work queued before, and work queued on the
    current stream after `Test()` was true finds the sum. Float16 and bfloat16 have no MPI type and
    too few bits to add in: they are converted to float32 and rounded once, at the end.
    """

    def __init__(
        self, comm: Communicator, flat: Array, ranges: Sequence[Range] | None = None
    ) -> None:
        self.queue = cached(comm, "sums", lambda: _Queue(comm))
        kind: type[_HostSum | _DeviceSum] = _HostSum
        if arrays.is_device(flat):
            kind = _DeviceSum
        self.sum = kind(self.queue, flat, _Operation(comm.rank, ranges))
        self.queue.add(self.sum)

    def Test(self) -> bool:
        """Whether the sum is there; lets all sums on the communicator advance."""
        self.queue.progress()
        return self.sum.finish()

    def progress(self) -> None:
        self.queue.progress()
        self.sum.poll()

    def Cancel(self) -> None:
        """Give up all sums of this communicator after a failure, and free no memory of theirs."""
        self.queue.abort()


class AllGather(AllReduce):
    """A gather under way; `Test()` is true once `flat` has the `ranges` of all ranks.

    Each range is as its rank has it.

    The ranges follow each other from 0 to the end. All else is as for sums; half types are not
    known here.
    """


class _Operation(NamedTuple):
    """What MPI does with a bucket, in place: it adds, or gathers the ranges that ranks have."""

    rank: int
    ranges: Sequence[Range] | None

    def buckets(self, size: int, itemsize: int, at_once: bool) -> list[Range]:
        """Ranges of elements that MPI gets; `at_once` where they take no other memory."""
        if at_once and self.ranges is not None:
            return cut_evenly(size, GATHERED)
        return cut_evenly(size, BUCKET_BYTES // itemsize)

    def begin(self, queue: _Queue, values: np.ndarray, start: int) -> Request:
        """Begin with the bucket that starts at `start`."""
        if self.ranges is None:
            return own(queue.comm.Iallreduce(queue.in_place, values))
        counts = []
        starts = []
        for item in self.ranges:
            first, last = _within(item, start, start + values.size)
            counts.append(last - first)
            starts.append(first - start)
        return own(queue.comm.Iallgatherv(queue.in_place, [values, (counts, starts)]))


def cut_evenly(size: int, most: int) -> list[Range]:
    """Cut `size` elements into ranges of `most`, at least one; the last may be shorter."""
    step = max(1, most)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _widened(values: np.ndarray) -> np.ndarray:
    """Return halves as float32, in which they are added, and other values as they are."""
    if values.itemsize >= 4:
        return values
    return values.astype(np.float32)


def _within(part: Range, start: int, stop: int) -> Range:
    """The part of a range that lies in a bucket."""
    first = min(max(part[0], start), stop)
    return first, max(first, min(part[1], stop))


class _Queue:
    """The sums on one communicator, and the pinned buffers that they share.

    Buffers go to buckets in their order, so the first bucket that is not summed has one on every
    rank: no bucket waits for a later one.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.in_place = runtime.library_of(comm).IN_PLACE
        # with collectives still to be started, in the order of the calls
        self.unstarted: deque[_HostSum | _DeviceSum] = deque()
        self.active: list[_DeviceSum] = []  # results are not back on the device
        self.pool = PinnedPool(BUFFERS * BUCKET_BYTES)
        # Buffers whose content is on its way to the device.
        self.returning: deque[tuple[Event, np.ndarray]] = deque()

    @cached_property
    def streams(self) -> tuple[AbstractContextManager, AbstractContextManager]:
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
            for item in self.active:
                item.poll()
            self.active = [item for item in self.active if not item.complete]
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
        self.unstarted = deque()
        self.active = []

    def close(self) -> None:
        """The communicator is freed: its sums are over."""
        unregister_progress(self)
        for event, _ in self.returning:
            event.synchronize()
        self.returning.clear()


class _HostSum:
    """The sum of a host buffer; half types are summed in a float32 copy."""

    def __init__(self, queue: _Queue, flat: np.ndarray, how: _Operation) -> None:
        self.queue = queue
        self.flat = flat
        self.how = how
        self.summed = _widened(flat)
        self.request: RequestGroup | None = None

    def start(self) -> bool:
        """Hand MPI what can be handed on; true once it has everything."""
        summed = self.summed
        buckets = self.how.buckets(summed.size, summed.itemsize, at_once=True)
        requests = []
        for start, stop in buckets:
            requests.append(self.how.begin(self.queue, summed[start:stop], start))
        self.request = RequestGroup(requests)
        return True

    def poll(self) -> None:
        self.finish()

    def finish(self) -> bool:
        """Whether the sum is in its place, for whatever comes next on the current stream."""
        if self.request is None or not self.request.Test():
            return False
        if self.summed is not self.flat:
            self.flat[...] = self.summed
            self.summed = self.flat
        return True


class _DeviceSum:
    """The sum of a device buffer, by way of pinned memory.

    MPI adds up `sums`: the `values` of a bucket, or float32 of halves.
    """

    def __init__(self, queue: _Queue, flat: DeviceArray, how: _Operation) -> None:
        self.queue = queue
        self.flat = flat
        self.how = how
        self.ready = arrays.record()
        self.outward, self.inward = queue.streams
        self.buckets = deque(how.buckets(flat.size, max(4, flat.itemsize), at_once=False))
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
            sums = _widened(values)
            request = self.how.begin(self.queue, sums, bounds[0])
            self.flying.append((request, buffer, values, sums, bounds))
        while self.buckets:
            start, stop = self.buckets[0]
            nbytes = (stop - start) * self.flat.itemsize
            taken = self.queue.take_buffer(nbytes)
            if taken is None:
                break
            self.buckets.popleft()
            values = taken[:nbytes].view(self.flat.dtype)
            first = start
            last = stop
            if self.how.ranges is not None:
                first, last = _within(self.how.ranges[self.how.rank], start, stop)
            with self.outward:
                if first < last:
                    part = values[first - start : last - start]
                    arrays.copy_to_host(part.view(np.uint8), self.flat[first:last])
                self.copying.append((arrays.record(), taken, values, (start, stop)))
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
