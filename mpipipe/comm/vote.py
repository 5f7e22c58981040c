"""A vote: an agreement that a rank begins without waiting for its outcome, which it presumes to be "all agree".

    rank 0   begin | what does not need the outcome, or can still be thrown away ... | settle: all agree
    rank 1           begin | ........................................................ | settle: all agree

A vote is one exchange, the same as in any agreement. So it also meets a rank that makes another call of the same group,
and all ranks find out. While a vote is open:

- Nothing else begins on the communicator. MPI matches collectives by their order, and ranks that disagree would begin
  different ones. So `Group.begin` settles the vote first.
- Every wait of this rank tests the vote (process.register_progress). If ranks disagree, the messages that this rank
  waits for may never come, and the other ranks wait for its part in the explanation.
- A failure of the group ends the vote: nobody tests it or waits for it any more.
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
    """One vote of a group; the constructor does not wait for the other ranks.

    Parameters
    ----------
    group : the ranks that agree; a group has at most one open vote
    ballot : call and facts of this rank; it is used for this vote alone
    values : at most consensus.VALUES integers of this rank
    """

    def __init__(self, group: Group, ballot: Ballot, values: Sequence[int] = ()) -> None:
        self.group, self.ballot, self._count = group, ballot, len(values)
        group.settle()  # first the vote before: then the ballot can take the number of its call
        self._exchange = Exchange(group, ballot.row(group, values), ballot.text)
        self._values: np.ndarray | None = None
        self._error: MpipipeError | None = None
        if group.size > 1:
            group.vote = self
            register_progress(self)

    def progress(self) -> None:
        """Test whether the outcome is there. Never waits if ranks agree; raises the common error if they do not."""
        if self._exchange.Test():
            self._close()

    def settle(self) -> np.ndarray:
        """Wait for the outcome, and return the values of all ranks; if ranks disagree, all raise the same error."""
        if self._values is None:
            self.group.process.advancing.pop(self, None)  # the wait below would come back to this vote
            self._exchange.result()
            self._close()
        if self._error is not None:
            raise self._error
        assert self._values is not None  # by _close
        return self._values

    def abandon(self) -> None:
        """Drop the vote, because its group is closed or has failed, or because its outcome is there."""
        self.group.vote = None
        self.group.process.advancing.pop(self, None)

    def _close(self) -> None:
        """Take the outcome, which is there."""
        self.abandon()
        self._values = self.ballot.count(self._exchange.table, self._count)
        try:
            self.ballot.decide()
        except MpipipeError as error:
            self._error = error
            raise
