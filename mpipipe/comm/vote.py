"""A vote: an agreement that a rank begins and does not wait for. It goes on with what it presumes the outcome to be.

    rank 0   begin | what does not need the outcome, or can still be thrown away ... | settle: all agree
    rank 1           begin | ........................................................ | settle: all agree

A vote is one exchange like that of any agreement. So a rank that makes another call of the same group is met in it, and
all ranks find out. While a vote is open

- nothing else begins on the communicator: collectives are matched by their order there, and ranks that do not agree
  have different ones in mind. `Group.begin` settles the vote first;
- every wait of this rank looks at it (process.register_progress): where ranks disagree, the messages that this rank
  waits for may never come, and the others wait for its part in the explanation;
- a failure of the group ends it: it is neither tested nor waited for any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.comm.consensus import Ballot
from mpipipe.comm.exchange import Exchange
from mpipipe.comm.group import Group
from mpipipe.comm.process import register_progress
from mpipipe.errors import MpipipeError


class Vote:
    """One vote under way on this rank; the constructor does not wait.

    Parameters
    ----------
    group : whose ranks agree; no two votes of a group are open at once
    ballot : call and facts of this rank, cast nowhere else
    values : at most consensus.VALUES integers of this rank
    """

    def __init__(self, group: Group, ballot: Ballot, values: Sequence[int] = ()) -> None:
        self.group, self.ballot, self._count = group, ballot, len(values)
        group.settle()  # before the ballot takes the number of the call
        self._exchange = Exchange(group, ballot.row(group, values), ballot.text)
        self._values: np.ndarray | None = None
        self._error: MpipipeError | None = None
        if group.size > 1:
            group.vote = self
            register_progress(self)

    def progress(self) -> None:
        """Look whether the outcome is there; never waits where ranks agree, and raises the error where they do not."""
        if self._exchange.Test():
            self._close()

    def settle(self) -> np.ndarray:
        """Wait for the outcome, and return everybody's values; raises the same error on all ranks that disagree."""
        if self._values is None:
            self.group.process.engines.pop(self, None)  # the wait below would come back to this vote
            self._exchange.result()
            self._close()
        if self._error is not None:
            raise self._error
        assert self._values is not None  # by _close
        return self._values

    def abandon(self) -> None:
        """Look at the vote no more: its group is closed, or has failed."""
        self.group.vote = None
        self.group.process.engines.pop(self, None)

    def _close(self) -> None:
        """Take the outcome, once it is there."""
        self.abandon()
        self._values = self.ballot.count(self._exchange.table, self._count)
        try:
            self.ballot.decide()
        except MpipipeError as error:
            self._error = error
            raise
