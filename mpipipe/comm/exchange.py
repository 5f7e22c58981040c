"""An exchange: an all-gather of one row of numbers from each rank of a group. Every agreement is made of exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpipipe.comm.consensus import VALUES
from mpipipe.comm.requests import own
from mpipipe.comm.types import Communicator
from mpipipe.comm.wait import WaitingGroup, wait


class ExchangingGroup(WaitingGroup, Protocol):
    """What an exchange needs of its group; comm.group.Group has it."""

    @property
    def comm(self) -> Communicator: ...

    @property
    def size(self) -> int: ...

    def begin(self) -> None: ...

    def fail_because(self, error: BaseException, what: str) -> None: ...


class OpenVote(Protocol):
    """What a group needs of an agreement whose outcome is not known yet; comm.vote.Vote has it."""

    def settle(self) -> np.ndarray: ...

    def abandon(self) -> None: ...


class Exchange:
    """One exchange; the constructor begins it as a call of the group, and does not wait.

    Parameters
    ----------
    group : the ranks that take part
    row : at most 2 + VALUES integers of this rank
    what : names the call, for errors

    Attributes
    ----------
    table : int64 (size, 2 + VALUES), the rows of all ranks once `Test` is true
    """

    def __init__(self, group: ExchangingGroup, row: Sequence[int], what: str) -> None:
        group.begin()
        self.group, self.what = group, what
        mine = np.zeros(2 + VALUES, np.int64)
        mine[: len(row)] = row
        self.table, self._request = mine[None], None
        if group.size > 1:
            self.table = np.empty((group.size, mine.size), np.int64)
            self._number = group.process.flight.begin(what, nbytes=mine.nbytes)
            self._request = own(group.comm.Iallgather(mine, self.table))

    def Test(self) -> bool:
        """Return whether all rows are here; never waits."""
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        self._request = None
        self.group.process.flight.end(self._number)
        return True

    def result(self) -> np.ndarray:
        """Wait for the rows of all ranks, and return them. An error during the wait ends the life of the group."""
        if self._request is not None:
            try:
                wait(self, self.what, self.group, everyone=True)
            except BaseException as error:
                self.group.fail_because(error, self.what)
                raise
        return self.table
