"""A group: ranks that agree on their calls, wait for each other, and hear of each other's end.

A group brings four things together, each in a file of its own: a private communicator (communicators.py), agreement
(consensus.py), news of the other ranks (presence.py, notes.py), and the wait that listens to them (wait.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from mpipipe.errors import ArgumentError, MpipipeError, PeerError
from mpipipe.job import communicators, runtime
from mpipipe.job.communicators import cached
from mpipipe.job.consensus import VALUES, Ballot, Entry, Facts, dumps_anyhow, peer_error
from mpipipe.job.context import Failure, current_rank, failure_of, is_rank, register_progress
from mpipipe.job.peers import PeerStatus
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, Testable
from mpipipe.job.wait import WaitingGroup, wait
from mpipipe.job.watch.membership import enrol


def group_of(comm: Communicator | None = None) -> Group:
    """The group of a user's communicator, for all calls that have none of their own; None means COMM_WORLD.

    Collective the first time. The group is closed when `comm` is freed. One that has failed is never made anew: ranks
    that learn of the failure in a later call than others would not come to that.
    """
    users = runtime.resolve(comm)
    return cached(users, "group", lambda: Group(users))


class Group:
    """The ranks of a communicator, on a private duplicate of it.

    Every method but `fail` and `wait` is collective. One that raises on this rank alone, because a peer has failed for
    example, ends the life of the group, and the other ranks are told.

    Parameters
    ----------
    comm : Communicator
        To duplicate; collective.

    Attributes
    ----------
    comm : Communicator
        The duplicate. Notes are its only point-to-point messages; its collectives are those of this group's calls.
    rank, size : int
    peers : PeerStatus
        What is known of the other ranks.
    process : Process
        State of this rank.
    progress : callable, optional
        Returns a text of how far this rank has come, for peers that will miss it.
    key : tuple of int
        Names this group on all its ranks alike.
    related : list of Group
        Other groups of the same object, whose failure is this one's too.
    vote : OpenVote or None
        An agreement whose outcome is not known yet (vote.py): nothing else begins on `comm` before it is.
    """

    def __init__(self, comm: Communicator) -> None:
        members = communicators.world_ranks(comm)
        self.comm = communicators.duplicate(comm)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.context = current_rank()
        self.peers = PeerStatus(self.comm, members, self.context)
        self.progress: Callable[[], str] | None = None
        self.closed = self.left = False
        self.related: list[Group] = []
        self.vote: OpenVote | None = None
        self.key = enrol(self.context, self.comm, members)
        self.context.groups.append(self)

    @property
    def world_rank(self) -> int:
        """Number of this rank in COMM_WORLD."""
        return self.peers.members[self.rank]

    def agreed_on(self, error: BaseException) -> bool:
        """Whether all ranks of this group raise this same error."""
        return getattr(error, "agreed", frozenset()).issuperset(self.peers.members)

    @property
    def failure(self) -> Failure | None:
        """Why this group cannot be used any more, else None."""
        return self.peers.failure

    # -- agreement ----------------------------------------------------------------------------------------------

    def agree(
        self,
        call: str,
        facts: Facts = (),
        values: Sequence[int] = (),
        error: Exception | None = None,
        message: str | None = None,
        remedy: str | None = None,
    ) -> np.ndarray:
        """Find that all ranks make this call with the same facts.

        Parameters
        ----------
        call : str
            What this rank does.
        facts : tuple of (str, value)
            Named values that must be the same on all ranks, hashable and of plain types.
        values : sequence of int
            At most consensus.VALUES integers of this rank.
        error : Exception, optional
            Why this rank cannot take part; all ranks raise it then.
        message, remedy : str, optional
            Of the MismatchError if ranks differ.

        Returns
        -------
        ndarray of int64, shape (size, number of values)
            Everybody's values.

        Raises
        ------
        MismatchError
            Where calls or facts differ; the same on all ranks.
        """
        ballot = Ballot(call, facts, error, message, remedy)
        table = ballot.cast(self, values)
        ballot.decide()
        return table

    def gather(self, call: str, value: Any, error: Exception | None = None) -> list[Any]:
        """Every rank's `value`, any picklable object, in rank order; raises on all ranks where one has an error."""
        content, error = _pickled(value, error)
        sizes = self.agree(call, values=[len(content)], error=error)[:, 0].tolist()
        return self._spread(content, sizes, call)

    def broadcast(self, call: str, value: Any, root: int = 0) -> Any:
        """`value` of rank `root`, any picklable object, on every rank."""
        content, error = _pickled(value, None) if self.rank == root else (b"", None)
        size = int(self.agree(call, (("root", root),), [len(content)], error)[root, 0])
        if self.size == 1:
            return value
        buffer = np.empty(size, np.uint8)
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        with self.failing(call):
            self.wait(own(self.comm.Ibcast(buffer, root)), call, everyone=True)
        return value if self.rank == root else pickle.loads(buffer.tobytes())

    @contextmanager
    def raise_together(self, call: str) -> Iterator[None]:
        """Run the block on every rank; an error of any rank is raised on all of them at the block's end."""
        error = None
        try:
            yield
        except Exception as caught:
            if isinstance(caught, PeerError) or self.failure is not None:
                raise
            error = caught
        self.agree(call, error=error)

    def exchange(self, row: Sequence[int], what: str) -> np.ndarray:
        """The rows of all ranks, int64 of shape (size, 2 + VALUES); the base of every agreement. Begins a call."""
        return Exchange(self, row, what).result()

    def gather_reasons(self, entries: list[Entry], what: str) -> list[Entry]:
        """The entries of all ranks, in rank order; for calls in which all know that something is wrong."""
        content = dumps_anyhow(entries)
        sizes = self.exchange([len(content)], what)[:, 0].tolist()
        found = [entry for block in self._spread(content, sizes, what) for entry in block]
        with suppress(PeerError):  # a rank that ends over this must not be heard of before all know what it is about
            self.exchange([], what)
        return found

    def _spread(self, content: bytes, sizes: list[int], what: str) -> list[Any]:
        """What every rank has pickled, where all know the `sizes` in bytes."""
        if self.size == 1:
            return [pickle.loads(content)]
        mine, table = np.zeros(max(sizes), np.uint8), np.empty((self.size, max(sizes)), np.uint8)
        mine[: len(content)] = np.frombuffer(content, np.uint8)
        with self.failing(what):
            self.wait(own(self.comm.Iallgather(mine, table)), what, everyone=True)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(table, sizes)]

    # -- waiting ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Count one more call of this group."""
        if self.closed or runtime.finalized(self.comm):
            raise ArgumentError(
                "the communicator is gone",
                found="a call on a communicator that was freed, or after MPI_Finalize",
                remedy="free communicators, and finalize MPI, after the last call that uses them",
            )
        if self.failure is not None:
            raise peer_error(self.failure, remedy="start the job anew: an earlier call of these ranks has failed")
        self.settle()
        self.peers.calls += 1

    def settle(self) -> None:
        """Wait for the outcome of an agreement that is open, and raise what it is; before any other use of `comm`."""
        if self.vote is not None:
            self.vote.settle()

    def wait(self, request: Testable, what: object = None, everyone: bool = False, peer: int | None = None) -> None:
        """Wait for a request that belongs to the call under way; `everyone` and `peer` say who must come for it."""
        wait(request, what, self, everyone, peer)

    # -- communicators ------------------------------------------------------------------------------------------

    def split(self, color: int, key: int, name: str) -> Communicator:
        """A communicator of the ranks with the same `color`, ordered by `key`, for others to use and to free."""
        self.agree(f"making the communicator {name!r}")
        return communicators.split(self.comm, color, key, name)

    # -- failure and end ----------------------------------------------------------------------------------------

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """End the life of this group, and tell the peers, when anything is raised within."""
        try:
            yield
        except BaseException as error:
            self.fail_because(error, what)
            raise

    def fail_because(self, error: BaseException, what: str) -> None:
        """Tell every other rank that an error in `what` keeps this one from going on."""
        self.fail(error, f"{runtime.whoami()} failed in {what}: {type(error).__name__}: {error}")

    def fail(self, error: BaseException, text: str, making: bool = False) -> None:
        """Tell every other rank, once, that `error` keeps this one from going on. Returns without waiting."""
        if is_rank() and not self.closed and not runtime.finalized(self.comm):
            self.peers.fail(failure_of(error, text, self.world_rank, making))
        self._detach()

    def read_messages(self) -> None:
        """Take in the notes of the peers; never waits."""
        self.peers.read()
        if self.failure is not None:
            self._detach()

    def leave(self) -> None:
        """Tell peers, once, that the script ends, so that they do not wait for this rank. Returns without waiting."""
        if not self.closed and not self.left and not runtime.finalized(self.comm):
            self.left = True
            calls = f"collective call {self.peers.calls}" if self.progress is None else self.progress()
            self.peers.leave(f"rank {self.rank} ({runtime.whoami()}) left the job after {calls}")

    def withdraw(self, members: Container[int], failure: Failure) -> None:
        """Tell the world ranks `members` that this one makes no communicator with them any more; never waits."""
        if not self.closed and not runtime.finalized(self.comm):
            self.peers.withdraw(members, failure)

    def _detach(self) -> None:
        if self.vote is not None:
            self.vote.abandon()
        with self.context.lock:
            if self in self.context.groups:
                self.context.groups.remove(self)
                if self.failure is not None:
                    self.context.keep_failed(self)

    def close(self) -> None:
        """Free the communicator; collective, may be called twice. After a failure it is kept for notes under way."""
        if self.closed or self.failure is not None:
            return
        self.agree("close")
        self.peers.closing = True  # from here on no rank sends a note, so that their number is final
        messages = int(self.agree("close: the number of notes", values=[self.peers.sent])[:, 0].sum())
        with self.failing("close"):
            self.wait(_Settled(self.peers, messages), "the last notes of a group", everyone=True)
        self._detach()
        self.closed = True
        self.comm.Free()


def _pickled(value: Any, error: Exception | None) -> tuple[bytes, Exception | None]:
    """(`value` in bytes, error). No bytes where there is an error; an error where the value cannot be pickled."""
    try:
        return (pickle.dumps(value), None) if error is None else (b"", error)
    except Exception as caught:
        return b"", caught


class _Settled:
    """A request that is complete once every note of a group has been received, and answered."""

    def __init__(self, presence: PeerStatus, messages: int) -> None:
        self.peers, self.messages = presence, messages

    def Test(self) -> bool:
        with self.peers.context.lock:
            return self.peers.settled(self.messages)


# -- An exchange: an all-gather of one row of numbers from each rank of a group. Every agreement is made of exchanges


class ExchangingGroup(WaitingGroup, Protocol):
    """What an exchange needs of its group; job.group.Group has it."""

    @property
    def comm(self) -> Communicator: ...

    @property
    def size(self) -> int: ...

    def begin(self) -> None: ...

    def fail_because(self, error: BaseException, what: str) -> None: ...


class OpenVote(Protocol):
    """What a group needs of an agreement whose outcome is not known yet; job.group.Vote has it."""

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
            self._number = group.context.flight.begin(what, nbytes=mine.nbytes)
            self._request = own(group.comm.Iallgather(mine, self.table))

    def Test(self) -> bool:
        """Return whether all rows are here; never waits."""
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        self._request = None
        self.group.context.flight.end(self._number)
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


# -- A vote: an agreement that a rank begins without waiting for its outcome, which it presumes to be "all agree" -----
#
#     rank 0   begin | what does not need the outcome, or can still be thrown away ... | settle: all agree
#     rank 1           begin | ........................................................ | settle: all agree
#
# A vote is one exchange, the same as in any agreement. So it also meets a rank that makes another call of the same
# group, and all ranks find out. While a vote is open:
#
# - Nothing else begins on the communicator. MPI matches collectives by their order, and ranks that disagree would begin
#   different ones. So `Group.begin` settles the vote first.
# - Every wait of this rank tests the vote (process.register_progress). If ranks disagree, the messages that this rank
#   waits for may never come, and the other ranks wait for its part in the explanation.
# - A failure of the group ends the vote: nobody tests it or waits for it any more.


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
            self.group.context.advancing.pop(self, None)  # the wait below would come back to this vote
            self._exchange.result()
            self._close()
        if self._error is not None:
            raise self._error
        assert self._values is not None  # by _close
        return self._values

    def abandon(self) -> None:
        """Drop the vote, because its group is closed or has failed, or because its outcome is there."""
        self.group.vote = None
        self.group.context.advancing.pop(self, None)

    def _close(self) -> None:
        """Take the outcome, which is there."""
        self.abandon()
        self._values = self.ballot.count(self._exchange.table, self._count)
        try:
            self.ballot.decide()
        except MpipipeError as error:
            self._error = error
            raise
