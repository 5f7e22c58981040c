"""A row of numbers of which each rank of a group has a part, put together on the devices by NCCL.

Each rank fills its part of a row of zeros, and NCCL adds the rows up. A number plus zeros is that number, whatever the
order. So all ranks get the same bits, those that each rank had.

The host waits for nothing. The current stream waits for the row, and the host hears of failures where it waits for what
comes behind (`wait`). Nothing else of NCCL is under way meanwhile, so no order is needed: a call of a pipeline ends
when the host has seen the end of all its messages and sums, and `wait` ends before the next call begins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.comm.group import Group
from mpipipe.comm.nccl.channel import Channel, close_together, new_identity, open_together
from mpipipe.comm.nccl.task import Task
from mpipipe.comm.requests import keep_forever

KIND = np.dtype(np.float64)


class NcclRow:
    """Rows of one length over the ranks of one group; the constructor and `close` are collective.

    Parameters
    ----------
    group : Group
    length : int
        Of all rows, at least 1.
    what : str
        What the rows are for, for errors.
    """

    def __init__(self, group: Group, length: int, what: str) -> None:
        self.group, self.length, self.what = group, length, what
        opening = f"opening NCCL for {what}"
        identity = group.broadcast(opening, new_identity() if group.rank == 0 else None)
        open_channel = partial(Channel, group.size, group.rank, identity, self._first)
        (self.channel,) = open_together([Task(open_channel, opening)], group, opening)

    def _first(self, communicator: Any, stream: int) -> DeviceArray:
        """Let NCCL connect the ranks for the one size that there will be."""
        row = arrays.zeros(self.length, KIND, "cuda")
        arrays.stream().synchronize()
        self._add(row, communicator, stream)
        return row

    def _add(self, row: DeviceArray, communicator: Any, stream: int) -> None:
        library, place = arrays.nccl(), arrays.address(row)
        communicator.allReduce(place, place, self.length, library.NCCL_FLOAT64, library.NCCL_SUM, stream)

    def share(self, row: DeviceArray) -> None:
        """Make `row`, with zeros beside this rank's part, the row of all ranks for later work on the current stream."""
        arrays.wait_for(self.channel.put(partial(self._add, row), [arrays.record()]))

    def failing(self) -> AbstractContextManager[None]:
        """For `with`: tell the other ranks, who wait for this one, when anything is raised within."""
        return self.group.failing(self.what)

    def wait(self, is_done: Callable[[], bool], keeping: object) -> None:
        """Wait for what was put on the current stream behind a row.

        Raises where a rank has failed. Then `keeping` is kept for ever: the device may still touch its memory.
        """
        try:
            with self.failing():
                self.group.wait(_Behind(self.channel, is_done), self.what, everyone=True)
        except BaseException:
            keep_forever(keeping)
            self.abort()
            raise

    def abort(self) -> None:
        """After a failure: let kernels end that wait for other ranks, and free nothing that they may still touch."""
        keep_forever(self)
        self.channel.abort()

    def close(self) -> None:
        """Free the communicator; collective, and only when no row is under way."""
        close_together([self.channel], partial(self.group.wait, what="the end of NCCL's communicators"))


class _Behind:
    """A request that is complete once `is_done()`; finds failures of NCCL meanwhile."""

    def __init__(self, channel: Channel, is_done: Callable[[], bool]) -> None:
        self.channel, self.is_done = channel, is_done

    def Test(self) -> bool:
        self.channel.check()
        return self.is_done()
