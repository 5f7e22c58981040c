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
from typing import TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm.pieces import ArrayPiece, PieceLine, PieceRequest
from mpipipe.comm.transport.staged import Chunk, PinnedPool
from mpipipe.job import Communicator, Request, cached, own, register_progress, unregister_progress

BUCKET_BYTES = 32 << 20
GATHERED = 1 << 30  # elements of a host buffer that MPI gathers at once: it counts with 32 bits
# Pinned buckets in use at once on one communicator: one on its way out, one summed, one on its way
# back; and one more where all are on their way back.
BUFFERS = 3
Range: TypeAlias = tuple[int, int]


class AllReduce(PieceRequest):
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
        self.ranges = ranges
        self.dtype = flat.dtype
        # Values of each bucket that MPI has, and what it adds them in.
        self.sums: deque[tuple[np.ndarray, np.ndarray]] = deque()
        ready = None
        if arrays.is_device(flat):
            ready = arrays.record()
            register_progress(self.queue)  # it may hold buckets back that peers wait for
        super().__init__(self.queue, self.queue, ready)
        most = BUCKET_BYTES // max(4, flat.itemsize)
        if ranges is not None and self.ready is None:
            most = GATHERED  # MPI needs no other memory for it
        for start, stop in cut_evenly(flat.size, most):
            self.add(self._bucket(flat[start:stop], start))
        self.queue.progress()

    def _bucket(self, part: Array, start: int) -> ArrayPiece:
        if self.ready is None:
            return ArrayPiece(self, part, start)
        gives = slice(None)
        if self.ranges is not None:
            first, last = _within(self.ranges[self.queue.comm.rank], start, start + part.size)
            gives = slice((first - start) * part.itemsize, (last - start) * part.itemsize)
        return Chunk(self.queue.pool, gives, True, self, part.view(np.uint8), start)

    def start(self, piece: ArrayPiece) -> Request:
        values = piece.memory.view(self.dtype)
        sums = values
        if values.itemsize < 4:  # halves are added in float32
            sums = values.astype(np.float32)
        self.sums.append((values, sums))
        comm = self.queue.comm
        if self.ranges is None:
            return own(comm.Iallreduce(None, sums))
        counts = []
        starts = []
        for item in self.ranges:
            first, last = _within(item, piece.start, piece.start + sums.size)
            counts.append(last - first)
            starts.append(first - piece.start)
        return own(comm.Iallgatherv(None, [sums, (counts, starts)]))

    def end(self, piece: ArrayPiece) -> None:
        super().end(piece)
        values, sums = self.sums.popleft()
        if sums is not values:
            values[...] = sums


class AllGather(AllReduce):
    """A gather under way; `Test()` is true once `flat` has the `ranges` of all ranks.

    Each range is as its rank has it.

    The ranges follow each other from 0 to the end. All else is as for sums; half types are not
    known here.
    """


def cut_evenly(size: int, most: int) -> list[Range]:
    """Cut `size` elements into ranges of `most`, at least one; the last may be shorter."""
    step = max(1, most)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _within(part: Range, start: int, stop: int) -> Range:
    """The part of a range that lies in a bucket."""
    first = min(max(part[0], start), stop)
    return first, max(first, min(part[1], stop))


class _Queue(PieceLine):
    """The sums on one communicator, and the pinned buffers that they share.

    Buffers go to buckets in their order, so the first bucket that is not summed has one on every
    rank: no bucket waits for a later one.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.pool = PinnedPool(BUFFERS * BUCKET_BYTES)

    def close(self) -> None:
        """The communicator is freed: its sums are over."""
        unregister_progress(self)
        self.pool.finish()
