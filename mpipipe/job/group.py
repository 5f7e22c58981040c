"""A group: ranks that agree on their calls, wait for each other, and learn of each other's end.

A group brings four things together, each in a file of its own: a private communicator (communicators.py), agreement
(consensus.py), what is known of the other ranks (context.PeerStatus), and the wait that reads their messages (wait.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import communicators, runtime
from mpipipe.job.communicators import cached
from mpipipe.job.consensus import Ballot, Exchange, Facts, Reason, Vote, dumps_anyhow
from mpipipe.job.context import Failure, PeerStatus, current_rank, failure_of, is_rank, peer_error, whoami
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, Testable
from mpipipe.job.wait import wait_for
from mpipipe.job.watch.watchdog import enrol


def group_of(comm: Communicator | None = None) -> RankGroup:
    """The group of a user's communicator, for all calls without a group of their own; None means COMM_WORLD.

    Collective the first time. The group is closed when `comm` is freed. One that has failed is never made anew: ranks
    that learn of the failure in a later call than others would not come to that.
    """
    users = runtime.resolve(comm)
    return cached(users, "group", lambda: RankGroup(users))


class RankGroup:
    """The ranks of a communicator, on a private duplicate of it.

    Every method but `fail` and `wait` is collective. One that raises on this rank alone, because a peer has failed for
    example, ends the life of the group, and the other ranks are told. Control messages are the only point-to-point
    messages on `comm`; its collectives are those of this group's calls.
    """

    def __init__(self, comm: Communicator) -> None:
        members = communicators.world_ranks(comm)
        self.comm = communicators.duplicate(comm)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.context = current_rank()
        self.peers = PeerStatus(self.comm, members, self.context)
        self.progress: Callable[[], str] | None = None  # how far this rank has come, for peers that will miss it
        self.closed = self.left = False
        self.related: list[RankGroup] = []  # others of the same object, whose failure is this one's too
        self.vote: Vote | None = None  # an open one: nothing else begins on `comm` before its outcome is known
        self.key = enrol(self.context, self.comm, members)  # names this group on all its ranks alike
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
        """Find that all ranks make this call with the same facts; return the values of all ranks, (size, values).

        `facts` are named values of plain types, the same on every rank. `values` are up to consensus.VALUES integers of
        this rank. `error` is why this rank cannot take part: all ranks raise it. Where calls or facts differ, all raise
        the same MismatchError, whose `message` and `remedy` a caller may choose.
        """
        ballot = Ballot(call, facts, error, message, remedy)
        table = ballot.cast(self, values)
        ballot.decide()
        return table

    def gather(self, call: str, value: Any, error: Exception | None = None) -> list[Any]:
        """Return the `value` of every rank, any picklable object, in rank order; an `error` of one is raised on all."""
        content, error = _pickled(value, error)
        sizes = self.agree(call, values=[len(content)], error=error)[:, 0].tolist()
        return self._spread(content, sizes, call)

    def broadcast(self, call: str, value: Any, root: int = 0) -> Any:
        """Return the `value` of rank `root`, any picklable object, on every rank."""
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
        """Return the rows of all ranks, int64 of shape (size, 2 + VALUES); the base of every agreement."""
        return Exchange(self, row, what).result()

    def gather_reasons(self, reasons: list[Reason], what: str) -> list[Reason]:
        """Return the entries of all ranks, in rank order, in a call in which all know that something is wrong."""
        content = dumps_anyhow(reasons)
        sizes = self.exchange([len(content)], what)[:, 0].tolist()
        reasons = [reason for block in self._spread(content, sizes, what) for reason in block]
        with suppress(PeerError):  # no rank may end over this before all know what it is about
            self.exchange([], what)
        return reasons

    def _spread(self, content: bytes, sizes: list[int], what: str) -> list[Any]:
        """Return what every rank has pickled, where all know the `sizes` in bytes."""
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
        """Wait for the outcome of an open vote, and raise its error; before any other use of `comm`."""
        if self.vote is not None:
            self.vote.settle()

    def wait(self, request: Testable, what: object = None, everyone: bool = False, peer: int | None = None) -> None:
        """Wait for a request that belongs to the call under way; `everyone` and `peer` say who must come for it."""
        wait_for(request, what, self, everyone, peer)

    # -- communicators ------------------------------------------------------------------------------------------

    def split(self, color: int, key: int, name: str) -> Communicator:
        """Return a communicator of the ranks with the same `color`, ordered by `key`, for others to use and to free."""
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
        self.fail(error, f"{whoami()} failed in {what}: {type(error).__name__}: {error}")

    def fail(self, error: BaseException, text: str, making: bool = False) -> None:
        """Tell every other rank, once, that `error` keeps this one from going on; never waits."""
        if is_rank() and not self.closed and not runtime.finalized(self.comm):
            self.peers.fail(failure_of(error, text, self.world_rank, making))
        self._detach()

    def read_messages(self) -> None:
        """Take in the control messages of the peers; never waits."""
        self.peers.read()
        if self.failure is not None:
            self._detach()

    def leave(self) -> None:
        """Tell the peers, once, that the script ends, so that they do not wait for this rank; never waits."""
        if not self.closed and not self.left and not runtime.finalized(self.comm):
            self.left = True
            calls = f"collective call {self.peers.calls}" if self.progress is None else self.progress()
            self.peers.leave(f"rank {self.rank} ({whoami()}) left the job after {calls}")

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
        """Free the communicator; collective, may be called twice. After a failure it is kept for messages under way."""
        if self.closed or self.failure is not None:
            return
        self.agree("close")
        self.peers.closing = True  # from here on no rank sends WAITING, so that the number of messages is final
        messages = int(self.agree("close: the number of notes", values=[self.peers.sent])[:, 0].sum())
        with self.failing("close"):
            self.wait(_Settled(self.peers, messages), "the last notes of a group", everyone=True)
        self._detach()
        self.closed = True
        self.comm.Free()


def _pickled(value: Any, error: Exception | None) -> tuple[bytes, Exception | None]:
    """Return (`value` in bytes, error), with no bytes where there is an error, also one of pickling."""
    try:
        return (pickle.dumps(value), None) if error is None else (b"", error)
    except Exception as caught:
        return b"", caught


class _Settled:
    """A request that is complete once every control message of a group has been received, and answered."""

    def __init__(self, presence: PeerStatus, messages: int) -> None:
        self.peers, self.messages = presence, messages

    def Test(self) -> bool:
        with self.peers.context.lock:
            return self.peers.settled(self.messages)


def collect(group: RankGroup, comm: Communicator, value: Any) -> list[Any] | None:
    """Return the values of all ranks in rank order on rank 0, and None on the others; collective.

    Unlike those of `RankGroup.gather`, they may be too large to be on all ranks. `comm` has the ranks of the group, and
    no other messages are under way on it.
    """
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = group.agree("collecting what all ranks have", values=[content.size])[:, 0].tolist()
    with group.failing("collecting what all ranks have"):
        if comm.rank > 0:
            group.wait(own(comm.Isend(content, 0, 0)), "rank 0, to take what this rank has", peer=0)
            return None
        values = [value]
        for peer in range(1, comm.size):
            buffer = np.empty(sizes[peer], np.uint8)
            group.wait(own(comm.Irecv(buffer, peer, 0)), f"what rank {peer} has", peer=peer)
            values.append(pickle.loads(buffer.tobytes()))
    return values
