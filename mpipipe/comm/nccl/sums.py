"""Sums over replicas by NCCL: on the device, bucket by bucket, on a stream of their own.

Buckets are put on the stream in the order of the calls and of their places, the same on all ranks.
A kernel of NCCL waits for other ranks and holds its place on the device meanwhile. So messages that
the host moves on end before the first sum starts (pipeline/gradient_sums.py).

The host sees that a sum is done before anything uses it. So no wait of the host for its own device
can depend on a rank that has failed meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray, Event
from mpipipe.comm.allreduce import BUCKET_BYTES, cut_evenly
from mpipipe.comm.nccl.channel import NcclCommunicator, NcclTask, close_channel, open_channel
from mpipipe.job import Condition, RankGroup, keep_forever, register_progress, unregister_progress


class NcclSums:
    """The sums over the ranks of one group; the constructor and `close` are collective."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.channel = open_channel(
            group, partial(_first, 1, np.dtype(np.float32)), "the sums over the replicas"
        )
        # (sum, start, stop) of buckets that are not on the stream yet, in order
        self.waiting: deque[tuple[NcclSum, int, int]] = deque()
        # puts a bucket of a sum there where NCCL may have to connect ranks first; the next ones
        # wait for it
        self.task: tuple[NcclTask[Event], NcclSum] | None = None
        self.underway: deque[tuple[Event, NcclSum]] = deque()  # buckets on the stream
        # (type, count) that NCCL has made its connections for.
        self.connected: set[tuple[int, int]] = set()

    def takes(self, flat: arrays.Array) -> bool:
        """Whether an array can be summed here: one on a GPU, of a type that NCCL knows."""
        return arrays.is_device(flat) and arrays.nccl_type(flat.dtype) is not None

    def start(self, flat: DeviceArray) -> NcclSum:
        """Start a sum after all work on the current stream; in the same order on all ranks."""
        new = NcclSum(self, flat)
        for start, stop in cut_evenly(flat.size, BUCKET_BYTES // flat.itemsize):
            self.waiting.append((new, start, stop))
            new.left += 1
        register_progress(self)
        self.progress()
        return new

    def progress(self) -> None:
        self.channel.check()
        if self.task is not None and self.task[0].Test():
            task, new = self.task
            self.underway.append((task.value(), new))
            self.task = None
        while self.waiting and self.task is None:
            self._put(*self.waiting.popleft())
        while self.underway and arrays.is_done(self.underway[0][0]):
            self.underway.popleft()[1].left -= 1
        if self.task is None and not self.underway:
            unregister_progress(self)

    def _put(self, new: NcclSum, start: int, stop: int) -> None:
        part = new.flat[start:stop]
        key = _type_of(part)[0], part.size
        put = partial(self.channel.put, partial(_add, part), [new.ready])
        if key in self.connected:
            self.underway.append((put(), new))
            return
        self.connected.add(key)
        self.task = NcclTask(put, "a sum over the replicas by NCCL"), new

    def abort(self) -> None:
        """End kernels that wait for others after a failure, and free nothing of theirs."""
        unregister_progress(self)
        keep_forever(self)
        self.channel.abort()

    def close(self) -> None:
        """Free the communicator when no sum is under way; collective. After a failure it stays."""
        unregister_progress(self)
        if self.group.failure is None:
            close_channel(self.channel, self.group)


class NcclSum:
    """A sum under way; `Test()` is true once `flat` holds the sum over all ranks."""

    def __init__(self, sums: NcclSums, flat: DeviceArray) -> None:
        self.sums = sums
        self.flat = flat
        self.ready = arrays.record()
        self.left = 0

    def Test(self) -> bool:
        if self.left:
            self.sums.progress()
        return not self.left

    def progress(self) -> None:
        self.sums.progress()

    def Cancel(self) -> None:
        self.sums.abort()


def _type_of(part: DeviceArray) -> tuple[int, int]:
    kind = arrays.nccl_type(part.dtype)
    assert kind is not None  # NcclSums.takes was asked
    return kind


def _first(size: int, dtype: np.dtype, communicator: NcclCommunicator, stream: int) -> DeviceArray:
    """Let NCCL connect the ranks for a sum of this size; keep the result until it is done."""
    zeros = arrays.zeros(size, dtype, "cuda")
    arrays.stream().synchronize()
    _add(zeros, communicator, stream)
    return zeros


def _add(part: DeviceArray, communicator: NcclCommunicator, stream: int) -> None:
    place = arrays.address(part)
    kind, several = _type_of(part)
    communicator.allReduce(place, place, part.size * several, kind, arrays.nccl().NCCL_SUM, stream)


# -- A row of numbers, put together on the devices by NCCL: each rank has a part of it -------------
#
# Each rank fills its part of a row of zeros, and NCCL adds the rows up. A number plus zeros is that
# number, whatever the order. So all ranks get the same bits, those that each rank had.
#
# The host waits for nothing. The current stream waits for the row, and the host hears of failures
# where it waits for what comes after (`wait`). Nothing else of NCCL is under way meanwhile: a call
# of a pipeline ends when the host has seen the end of all its messages and sums, and `wait` ends
# before the next call begins.


KIND = np.dtype(np.float64)


class NcclRow:
    """Rows of one length over the ranks of a group; constructor and `close` are collective."""

    def __init__(self, group: RankGroup, length: int, what: str) -> None:
        self.group = group
        self.what = what
        self.channel = open_channel(group, partial(_first, length, KIND), what)

    def share(self, row: DeviceArray) -> None:
        """Make `row`, zeros except for this rank's part, the row of all ranks.

        Later work on the current stream finds it.
        """
        arrays.wait_for(self.channel.put(partial(_add, row), [arrays.record()]))

    def failing(self) -> AbstractContextManager[None]:
        """Within, what is raised ends the wait of the other ranks for this one."""
        return self.group.failing(self.what)

    def wait(self, is_done: Callable[[], bool], keeping: object) -> None:
        """Wait for what was put on the current stream after a row.

        Raises where a rank has failed. Then `keeping` is kept for ever: the device may still touch
        its memory.
        """

        def ended() -> bool:
            self.channel.check()  # finds failures of NCCL meanwhile
            return is_done()

        try:
            with self.failing():
                self.group.wait(Condition(ended), self.what)
        except BaseException:
            keep_forever(keeping)
            self.channel.abort()
            raise

    def close(self) -> None:
        """Free the communicator; collective, and only when no row is under way."""
        close_channel(self.channel, self.group)
