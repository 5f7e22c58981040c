"""A group: ranks that agree on their calls, wait for each other, and learn of each other's end.

The ranks of a group make the same collective calls in the same order, and each counts its own: 1,
2, 3, ... So a rank that has left after call 7 is missed in call 8.

A rank tells the others of its end by control messages. They have a fixed size, so small that MPI
takes one at once, received or not: a rank that is about to end itself need not wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import communicators, runtime
from mpipipe.job.communicators import cached
from mpipipe.job.consensus import Ballot, Facts, spread
from mpipipe.job.context import (
    Failure,
    current_rank,
    failure_of,
    finalized,
    is_rank,
    peer_error,
    whoami,
)
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, Request, Testable
from mpipipe.job.wait import wait_for
from mpipipe.job.watch.watchdog import watch_over

T = TypeVar("T")
MESSAGE_BYTES = 1024
# The rest of the text of a control message is cut.
TEXT_BYTES = 900
# What a control message says of its sender: it cannot go on with this group (and the number of the
# failure); its script has ended (after the call of this number), so that a receiver in a later one
# fails; it makes no communicator with the receiver any more (and the number of the failure).
ControlKind: TypeAlias = Literal["failed", "left", "withdrawn"]


def group_of(comm: Communicator | None = None) -> RankGroup:
    """Return the group of a user's communicator; None means COMM_WORLD.

    It serves all calls without a group of their own.

    Collective the first time. It is closed when `comm` is freed. One that has failed is never made
    anew: not all ranks would come to that in the same call.
    """
    users = runtime.resolve(comm)
    return cached(users, "group", lambda: RankGroup(users))


class RankGroup:
    """The ranks of a communicator, on a private duplicate of it.

    `members` are these ranks in COMM_WORLD. Control messages are the only point-to-point messages
    on `comm`; its collectives are those of this group's calls.
    """

    def __init__(self, comm: Communicator) -> None:
        watchdog = watch_over(comm)
        self.members = communicators.world_ranks(comm)
        covered = watchdog is None or watchdog.covers(self.members)
        # The key names this group on all its ranks alike.
        self.comm, self.key, covered = communicators.make(comm, covered)
        self.context = current_rank()
        self.rank = comm.rank
        self.size = comm.size
        self.world_rank = self.members[comm.rank]
        # Groups of the same object, whose failure is this one's too.
        self.related: Sequence[RankGroup] = []
        self.calls = 0  # collective calls of the group that this rank has begun
        self.closed = False
        self.has_left = False
        self.failure: Failure | None = None  # why the group cannot be used any more
        # rank -> (calls, text), where its script has ended
        self.left: dict[int, tuple[int, str]] = {}
        self._sending: list[Request] = []
        # a message that has arrived, and its buffer
        self._receiving: tuple[Request, np.ndarray] | None = None
        if watchdog is not None and not covered:
            watchdog.open_channel(self)
        self.context.groups.append(self)

    # -- calls -------------------------------------------------------------------------------------
    #
    # All are collective. One that raises on this rank alone, because a peer has failed for example,
    # ends the life of the group, and the other ranks are told.

    def agreed_on(self, error: BaseException) -> bool:
        """Whether all ranks of this group raise this same error."""
        return getattr(error, "agreed", frozenset()).issuperset(self.members)

    def agree(
        self,
        call: str,
        facts: Facts = (),
        values: Sequence[int] = (),
        error: Exception | None = None,
        message: str | None = None,
        remedy: str | None = None,
    ) -> np.ndarray:
        """Find that all ranks make this call with the same facts; return (size, values) of all.

        `facts` are named values of plain types, the same on every rank. `values` are up to
        consensus.VALUES integers of this rank. `error` is why this rank cannot take part: all ranks
        raise it. Where calls or facts differ, all raise the same MismatchError, whose `message` and
        `remedy` a caller may choose.
        """
        ballot = Ballot(call, facts, error, message, remedy)
        table = ballot.cast(self, values)
        ballot.decide()
        return table

    def gather(self, call: str, value: object) -> list[Any]:
        """Return the `value` of every rank, any picklable object, in rank order."""
        content, error = _pickled(value)
        sizes = self.agree(call, values=[len(content)], error=error)[:, 0].tolist()
        return spread(self, content, sizes, call)

    def broadcast(self, call: str, value: object, root: int = 0) -> Any:
        """Return the `value` of rank `root`, any picklable object, on every rank."""
        content = b""
        error = None
        if self.rank == root:
            content, error = _pickled(value)
        size = int(self.agree(call, (("root", root),), [len(content)], error)[root, 0])
        buffer = np.frombuffer(bytearray(content.ljust(size)), np.uint8)
        with self.failing(call):
            self.wait(own(self.comm.Ibcast(buffer, root)), call)
        if self.rank == root:
            return value
        return pickle.loads(buffer.tobytes())

    def from_one(self, call: str, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns, or raise what it raises, on rank 0."""
        value = None
        with self.raise_together(call):
            if self.rank == 0:
                value = make()
        return cast(T, self.broadcast(call, value))

    @contextmanager
    def raise_together(self, call: str) -> Iterator[None]:
        """Run the block on every rank; at its end, an error of any rank is raised on all."""
        error = None
        try:
            yield
        except Exception as caught:
            if isinstance(caught, PeerError) or self.failure is not None:
                raise
            error = caught
        self.agree(call, error=error)

    def wait(self, request: Testable, what: object = None, peer: int | None = None) -> None:
        """Wait for a request of the call under way; `peer`, or else all ranks, must come for it."""
        wait_for(request, what, self, peer)

    def split(self, color: int, key: int, name: str) -> Communicator:
        """Return a communicator of the ranks with the same `color`, ordered by `key`.

        Others use it, and free it.
        """
        self.agree(f"making the communicator {name!r}")
        return communicators.split(self.comm, color, key)

    def close(self) -> None:
        """Free the communicator; may be called twice. After a failure messages may be under way."""
        if self.closed or self.failure is not None:
            return
        self.agree("close")
        self._detach()
        self.closed = True
        self.comm.Free()

    # -- what one rank knows of the others: who has failed, and who has left -----------------------

    @property
    def usable(self) -> bool:
        """True while messages can be sent on `comm`."""
        return not self.closed and not finalized()

    def begin(self) -> None:
        """Begin a collective call."""
        if not self.usable:
            raise ArgumentError(
                "the communicator is gone",
                found="a call on a communicator that was freed, or after MPI_Finalize",
                remedy="free communicators, and finalize MPI, after the last call that uses them",
            )
        if self.failure is not None:
            remedy = "start the job anew: an earlier call of these ranks has failed"
            raise peer_error(self.failure, remedy)
        self.calls += 1

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """End the life of this group, and tell the peers, when anything is raised within."""
        try:
            yield
        except BaseException as error:
            self.fail(error, f"{whoami()} failed in {what}: {type(error).__name__}: {error}")
            raise

    def fail(self, error: BaseException, text: str, making: bool = False) -> None:
        """Tell every other rank, once, that `error` keeps this one from going on."""
        if is_rank() and self.usable:
            self._fail(failure_of(error, text, self.world_rank, making))
        self._detach()

    def _fail(self, failure: Failure) -> None:
        with self.context.lock:
            if self.failure is None:
                self.failure = failure
                self.send_all("failed", failure)

    def leave(self) -> None:
        """Tell the peers, once, that the script ends, so that none waits for this rank."""
        if self.usable and not self.has_left:
            self.has_left = True
            text = f"rank {self.rank} ({whoami()}) left the job after collective call {self.calls}"
            self.send_all("left", Failure(self.calls, text))

    def send_all(
        self, kind: ControlKind, failure: Failure, members: Container[int] | None = None
    ) -> None:
        """Send a control message to all other ranks, or to these world ranks; never waits."""
        if not self.usable:
            return
        text = failure.text.encode("utf-8", "backslashreplace")[:TEXT_BYTES]
        content = pickle.dumps((kind, self.rank, failure.number, text))
        message = np.frombuffer(content.ljust(MESSAGE_BYTES, b"\0"), np.uint8)
        with self.context.lock:
            for peer, member in enumerate(self.members):
                if peer != self.rank and (members is None or member in members):
                    self._sending.append(own(self.comm.Isend(message, peer, 0)))

    def _detach(self) -> None:
        """Take the group out of the open ones; one that has failed is still read."""
        context = self.context
        with context.lock:
            if self in context.groups:
                context.groups.remove(self)
                if self.failure is not None:
                    context.failed.append(self)

    def read_messages(self) -> None:
        """Take in the messages of the peers that have arrived; never waits."""
        self._sending = [request for request in self._sending if not request.Test()]
        while self._receiving is not None or self.comm.Iprobe():
            if self._receiving is None:
                buffer = np.empty(MESSAGE_BYTES, np.uint8)
                self._receiving = own(self.comm.Irecv(buffer)), buffer
            request, message = self._receiving
            if not request.Test():
                break
            self._receiving = None
            self._take(*pickle.loads(message.tobytes()))
        for peer, (call, text) in self.left.items():
            if call < self.calls and self.failure is None:
                missed = Failure(-1 - self.members[peer], text)
                self._fail(missed)
                self.context.add_failure(missed)
        if self.failure is not None:
            self._detach()

    def _take(self, kind: ControlKind, source: int, number: int, content: bytes) -> None:
        text = content.decode("utf-8", "replace")
        if kind == "left":
            self.left[source] = number, text
            self.context.left[self.members[source]] = text
        elif kind == "withdrawn":
            self.context.withdrawn[self.members[source]] = Failure(number, text)
        elif self.failure is None:
            # else this rank has raised what ended the group, and may have gone on since
            self.failure = Failure(number, text)
            self.context.add_failure(self.failure)


def _pickled(value: object) -> tuple[bytes, Exception | None]:
    """Return (`value` in bytes, error); one of them is empty."""
    try:
        return pickle.dumps(value), None
    except Exception as caught:
        return b"", caught
