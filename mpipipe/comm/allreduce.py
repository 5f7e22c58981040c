"""Sums over replicas: non-blocking, in buckets of a flat buffer, half types added in float32.

Device buffers go through pinned memory: bucket i is copied while bucket i - 1 is summed and bucket i - 2 returns. MPI
matches collectives by the order in which each rank starts them, so this order is that of the calls and of the buckets,
whichever copy is done first; a sum of a host buffer waits its turn as well.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mpipipe import arrays
from mpipipe.comm import runtime
from mpipipe.comm.attributes import cached
from mpipipe.comm.process import register_progress, unregister_progress
from mpipipe.comm.requests import keep_forever, own

BUCKET_BYTES = 32 << 20
PAGES = 3  # buckets of device buffers under way at once on one communicator: in, on the wire, out


class AllReduce:
    """An all-reduce under way; `Test()` is true once `flat` holds the sum over all ranks of `comm`.

    Every rank must start the sums on one communicator in the same order. `flat` is one-dimensional, on the host or on
    a GPU, and is left alone until then; on a GPU, work queued before is what it waits for, and work queued on the
    current stream after `Test()` was true finds the sum. Float16 and bfloat16 have no MPI type and too few bits to add
    in: they are converted to float32 and rounded once, at the end.
    """

    def __init__(self, comm, flat):
        self.queue = cached(comm, "sums", lambda: _Queue(comm))
        self.sum = (_DeviceSum if arrays.is_device(flat) else _HostSum)(self.queue, flat)
        self.queue.add(self.sum)

    def Test(self) -> bool:
        self.queue.progress()
        return self.sum.finish()

    def progress(self):
        """Let the sum advance, without a word to the current stream."""
        self.queue.progress()
        if isinstance(self.sum, _HostSum):
            self.sum.finish()

    def Cancel(self):
        """Give up all sums on this communicator after a failure; nothing that MPI or the device may touch is freed."""
        self.queue.abandon()


class _Queue:
    """The sums on one communicator, and the pinned pages that they share.

    Pages go to buckets in their order, so the first bucket that is not summed has one on every rank: no bucket waits
    for a later one.
    """

    def __init__(self, comm):
        self.comm, self.marker = comm, runtime.in_place(comm)
        self.unstarted: deque = deque()  # sums of which collectives are still to be started, in the order of the calls
        self.active: list = []  # device sums that are not back
        self.free: list = []
        self.returning: deque = deque()  # (event, page): on their way to the device
        self.pages = 0
        self.sides: tuple = ()

    def streams(self):
        """The streams of the copies out and in, made for the first device buffer."""
        if not self.sides:
            self.sides = arrays.side_stream(), arrays.side_stream()
        return self.sides

    def add(self, new):
        self.unstarted.append(new)
        if isinstance(new, _DeviceSum):
            self.active.append(new)
            register_progress(self)
        self.progress()

    def progress(self):
        while self.unstarted and self.unstarted[0].start():
            self.unstarted.popleft()
        if self.active:
            for each in self.active:
                each.collect()
            self.active = [each for each in self.active if not each.complete]
            if not self.active and not self.unstarted:
                unregister_progress(self)

    def take_page(self, nbytes):
        """Pinned bytes, or None while all pages are in use."""
        while self.returning and arrays.is_done(self.returning[0][0]):
            self.free.append(self.returning.popleft()[1])
        if not self.free:
            if self.pages == PAGES:
                return None
            self.pages += 1
            self.free.append(arrays.pinned(nbytes))
        page = self.free.pop()
        return page if page.size >= nbytes else arrays.pinned(nbytes)

    def abandon(self):
        unregister_progress(self)
        keep_forever((self.unstarted, self.active, self.free, self.returning))
        self.unstarted, self.active = deque(), []

    def close(self):
        """The communicator is freed: its sums are over."""
        unregister_progress(self)
        for event, _ in self.returning:
            event.synchronize()
        self.returning.clear()


def _buckets(size, itemsize):
    """Ranges of elements of at most BUCKET_BYTES, the same for host and device buffers."""
    count = max(1, BUCKET_BYTES // itemsize)
    return [(start, min(start + count, size)) for start in range(0, size, count)]


class _HostSum:
    def __init__(self, queue, flat):
        self.queue, self.flat = queue, flat
        self.work = flat if flat.dtype.itemsize >= 4 else flat.astype(np.float32)
        self.requests: list | None = None

    def start(self) -> bool:
        comm, marker, work = self.queue.comm, self.queue.marker, self.work
        buckets = _buckets(work.size, work.itemsize)
        self.requests = [own(comm.Iallreduce(marker, work[start:stop])) for start, stop in buckets]
        return True

    def finish(self) -> bool:
        if self.requests is None:
            return False
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        if self.requests:
            return False
        if self.work is not self.flat:
            self.flat[...] = self.work
            self.work = self.flat
        return True


class _DeviceSum:
    """Attributes

    copying : (event, page, values, range) of each bucket on its way to the host
    flying : (request, page, values, sums, range) of each bucket that MPI has; `values` is the page in the buffer's
        dtype, `sums` what MPI adds up: the same memory, or float32 for half types
    arrived : event behind the last copy back
    """

    def __init__(self, queue, flat):
        self.queue, self.flat, self.ready = queue, flat, arrays.record()
        self.outward, self.inward = queue.streams()
        self.buckets = deque(_buckets(flat.size, max(4, flat.itemsize)))
        self.copying: deque = deque()
        self.flying: deque = deque()
        self.arrived = None
        with self.outward:
            arrays.wait_for(self.ready)

    def start(self) -> bool:
        """Copy and start what can be; true once MPI has all buckets."""
        while self.copying and arrays.is_done(self.copying[0][0]):
            _, page, values, bounds = self.copying.popleft()
            sums = values if values.itemsize >= 4 else values.astype(np.float32)
            request = own(self.queue.comm.Iallreduce(self.queue.marker, sums))
            self.flying.append((request, page, values, sums, bounds))
        while self.buckets:
            start, stop = self.buckets[0]
            nbytes = (stop - start) * self.flat.itemsize
            page = self.queue.take_page(nbytes)
            if page is None:
                break
            self.buckets.popleft()
            with self.outward:
                arrays.copy_to_host(page[:nbytes], self.flat[start:stop])
                self.copying.append((arrays.record(), page, page[:nbytes].view(self.flat.dtype), (start, stop)))
        return not self.buckets and not self.copying

    def collect(self):
        """Copy back what is summed."""
        while self.flying and self.flying[0][0].Test():
            _, page, values, sums, (start, stop) = self.flying.popleft()
            if sums is not values:
                values[...] = sums
            with self.inward:
                arrays.copy_to_device(self.flat[start:stop], values.view(np.uint8))
                self.arrived = arrays.record()
            self.queue.returning.append((self.arrived, page))

    @property
    def complete(self) -> bool:
        return not (self.buckets or self.copying or self.flying)

    def finish(self) -> bool:
        if not self.complete:
            return False
        if self.arrived is not None:
            arrays.wait_for(self.arrived)
        return True
