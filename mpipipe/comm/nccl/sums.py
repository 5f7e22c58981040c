"""Sums over replicas by NCCL: on the device, bucket by bucket, on a stream of their own.

Buckets are put on the stream in the order of the calls and of their places, the same on all ranks.
A kernel of NCCL waits for other ranks and holds its place on the device meanwhile. So messages that
the host moves on end before the first sum starts (pipeline/gradient_sums.py).

The host sees that a sum is done before anything uses it. So no wait of the host for its own device
can depend on a rank that has failed meanwhile.
"""

from __future__ import annotations

from functools import partial

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray
from mpipipe.comm.allreduce import BUCKET_BYTES, cut_evenly
from mpipipe.comm.nccl.channel import Channel, NcclTask, nccl_type
from mpipipe.comm.pieces import ArrayPiece, PieceLine, PieceRequest
from mpipipe.job import Condition, RankGroup, Testable, register_progress, unregister_progress


class NcclSums(PieceLine):
    """The sums over the ranks of one group; the constructor and `close` are collective."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self.group = group
        self.channel = Channel(group, "the sums over the replicas")
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
