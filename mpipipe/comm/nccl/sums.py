"""Sums over replicas by NCCL: on the device, bucket by bucket, on a stream of their own.

Buckets are put on the stream in the order of the calls and of their places, the same on all ranks.
A kernel of NCCL waits for other ranks and holds its place on the device meanwhile. So messages that
the host moves on end before the first sum starts (pipeline/gradient_sums.py).

The host sees that a sum is done before anything uses it. So no wait of the host for its own device
can depend on a rank that has failed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray
from mpipipe.comm.allreduce import BUCKET_BYTES, cut_evenly
from mpipipe.comm.nccl.channel import Channel, NcclTask, nccl_type
from mpipipe.comm.pieces import ArrayPiece, PieceLine, PieceRequest
from mpipipe.job import (
    Condition,
    RankGroup,
    Testable,
    keep_forever,
    register_progress,
    unregister_progress,
)


class NcclSums(PieceLine):
    """The sums over the ranks of one group; the constructor and `close` are collective."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self.group = group
        self.channel = Channel(group, 1, np.float32, "the sums over the replicas")
        # (type, count) that NCCL has made its connections for.
        self.connected: set[tuple[int, int]] = set()

    def takes(self, flat: Array) -> bool:
        """Whether an array can be summed here: one on a GPU, of a type that NCCL knows."""
        return arrays.is_device(flat) and arrays.nccl_type(flat.dtype) is not None

    def start(self, flat: DeviceArray) -> NcclSum:
        """Start a sum after all work on the current stream; in the same order on all ranks."""
        new = NcclSum(self, self, arrays.record())
        for start, stop in cut_evenly(flat.size, BUCKET_BYTES // flat.itemsize):
            new.add(_Bucket(new, flat[start:stop]))
        register_progress(self)
        self.progress()
        return new

    def progress(self) -> None:
        self.channel.check()
        super().progress()

    def abort(self) -> None:
        """End kernels that wait for others after a failure, and free nothing of theirs."""
        super().abort()
        self.channel.abort()

    def close(self) -> None:
        """Free the communicator when no sum is under way; collective. After a failure it stays."""
        unregister_progress(self)
        if self.group.failure is None:
            self.channel.close()


class NcclSum(PieceRequest):
    """A sum under way; `Test()` is true once `flat` holds the sum over all ranks."""

    owner: NcclSums

    def start(self, piece: ArrayPiece) -> Testable:
        event = self.owner.channel.add(piece.part, self.ready)
        return Condition(partial(arrays.is_done, event))


class _Bucket(ArrayPiece):
    """A part of a sum; where NCCL may have to connect ranks for it, a thread waits for that."""

    whole: NcclSum
    task: NcclTask[Testable] | None = None

    def prepare(self, is_first: bool) -> bool:
        return True

    def post(self) -> bool:
        kind, _ = nccl_type(self.part)
        connected = self.whole.owner.connected
        if (kind, self.part.size) not in connected:
            connected.add((kind, self.part.size))
            start = partial(self.whole.start, self)
            self.task = NcclTask(start, "a sum over the replicas by NCCL")
        if self.task is None:
            return super().post()
        if self.task.Test():
            self.request = self.task.value()
            return True
        return False


# -- A row of numbers, put together on the devices by NCCL: each rank has a part of it -------------
#
# Each rank fills its part of a row of zeros, and NCCL adds the rows up. A number plus zeros is that
# number, whatever the order. So all ranks get the same bits, those that each rank had.
#
# The host waits for nothing. The current stream waits for the row, and the host hears of failures
# where it waits for what comes after (`wait`). Nothing else of NCCL is under way meanwhile: a call
# of a pipeline ends when the host has seen the end of all its messages and sums, and `wait` ends
# before the next call begins.


class NcclRow(Channel):
    """Rows of one length over the ranks of a group, in float64."""

    def __init__(self, group: RankGroup, length: int, what: str) -> None:
        super().__init__(group, length, np.float64, what)

    def share(self, row: DeviceArray) -> None:
        """Make `row`, zeros except for this rank's part, the row of all ranks.

        Later work on the current stream finds it.
        """
        arrays.wait_for(self.add(row, arrays.record()))

    def wait(self, is_done: Callable[[], bool], keeping: object) -> None:
        """Wait for what was put on the current stream after a row.

        Raises where a rank has failed. Then `keeping` is kept for ever: the device may still touch
        its memory.
        """

        def ended() -> bool:
            self.check()  # finds failures of NCCL meanwhile
            return is_done()

        try:
            with self.group.failing(self.what):
                self.group.wait(Condition(ended), self.what)
        except BaseException:
            keep_forever(keeping)
            self.abort()
            raise
