"""The state of one rank, for all of its threads, and what it knows of the other ranks of each
group.

A rank is a process, or a thread of `job.inprocess`, which calls `adopt`; `current_rank()` is the
calling rank's state.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import rank_list, settings
from mpipipe.job.flight import Inspectable
from mpipipe.job.requests import own
from mpipipe.job.types import Advancing, Communicator, Request
from mpipipe.trace import Recorder

YIELD_SECONDS = (
    2e-2  # how long a wait gives way to others before it sleeps: the time of a large message
)
PAUSE_SECONDS = 5e-5  # how long it then sleeps between two polls: short next to any real stage
# the same where ranks share cores, and another rank has better use for this one
OVERSUBSCRIBED_YIELD_SECONDS = 1e-3
OVERSUBSCRIBED_PAUSE_SECONDS = 5e-4


class Failure(NamedTuple):
    """Why a rank could not go on; `number` is the same on every rank that knows of it.

    The number is positive for an error, and -1 minus the world rank for a rank that has left. It
    has the bit MAKING where all ranks come out of the same constructor by it, so that they can make
    what they want anew.
    """

    number: int
    text: str


class Making(NamedTuple):
    """A communicator that a rank waits to have made, by its ranks: their checksum, and the count of
    such ones.
    """

    code: int
    number: int


class Maker(NamedTuple):
    """What a rank says that waits for others to make a communicator with it."""

    calls: int  # of the group by which it says so, before it came to wait
    making: Making
    answered: Making  # one of the receiver, to which it has not come; of number 0 for none
    text: str


_count = itertools.count(1)
MAKING = 1 << 62


def failure_of(error: BaseException, text: str, world_rank: int, making: bool = False) -> Failure:
    """Return the failure that an exception stands for: the one that it carries, or a new one of
    this rank.
    """
    known = getattr(error, "failure", None)
    if not isinstance(known, Failure):
        known = Failure((world_rank + 1 << 32) + next(_count) + making * MAKING, text)
        with suppress(Exception):  # some classes of exceptions take no attributes
            error.failure = known  # type: ignore[attr-defined]  # any exception may carry it to the next group
    return known


def peer_error(failure: Failure, remedy: str | None = None) -> PeerError:
    """Return the error of a rank that knows of a failure of another one, which reports it."""
    error = PeerError(failure.text, remedy=remedy)
    error.reported_elsewhere = True
    error.failure = failure
    return error


class RankContext:
    """The state of one rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while control messages are read
        self.groups: list[
            OpenGroup
        ] = []  # open ones; every wait of this rank reads the control messages of all
        self.failed: list[OpenGroup] = []  # their messages still say who has left, or has withdrawn
        self.advancing: dict[
            Advancing, int
        ] = {}  # what waits must call -> the thread whose waits call it
        self.failures: list[
            Failure
        ] = []  # known ones, each once; a wait looks for news at the end of this list
        self.left: dict[int, str] = {}  # world rank -> text, for each rank whose script has ended
        self.withdrawn: dict[
            int, Failure
        ] = {}  # by world ranks with which this one makes no communicator any more
        self.makings: dict[int, int] = defaultdict(
            int
        )  # communicators that this rank began to make, by their ranks
        self.pipelines = self.groups_named = 0  # built, and made, so far
        self.alone = False  # whether this rank is a thread
        self.thread = threading.main_thread().ident  # the thread that is this rank
        self.patience = YIELD_SECONDS
        self.pause = PAUSE_SECONDS
        if settings.oversubscribed():
            self.patience = OVERSUBSCRIBED_YIELD_SECONDS
            self.pause = OVERSUBSCRIBED_PAUSE_SECONDS
        self.long_waits: list[Any] = []  # of wait.LongWait, one for each thread that waits
        self.long_waits_begun = 0
        self.watchdog: Any = None  # of job.watch.watchdog, once there is a group of several ranks
        self.ended = False  # whether the program of this rank is over
        self.unwritten = (
            False  # whether some of its output could not be written: its exit code is 1 then
        )
        self.recorders: set[Recorder] = set()  # note the waits of this rank
        self.owners: list[
            Any
        ] = []  # of checkpoint.owner.Owner: folders that the job of this rank owns
        self._inspectables: list[weakref.ref[Inspectable]] = []

    def add_failure(self, failure: Failure) -> None:
        """Note that a peer has failed: every wait under way on this rank ends. A known failure ends
        nothing.
        """
        if all(known.number != failure.number for known in self.failures):
            self.failures.append(failure)

    def withdraw(self, members: Collection[int], error: BaseException) -> None:
        """Make no communicator with the world ranks `members` any more, since an error ended the
        making of one.

        They are told in all groups, also those that have failed. That one of them has left is known
        without this.
        """
        groups = (*self.groups, *self.failed)
        number = getattr(getattr(error, "failure", None), "number", 0)
        if not groups or not is_rank() or number < 0 or number & MAKING:
            return
        own_rank = groups[0].world_rank
        text = f"world rank {own_rank} made no communicator: {type(error).__name__}: {error}"
        failure = failure_of(error, text, own_rank)
        self.withdrawn.update((member, failure) for member in members if member != own_rank)
        for group in groups:
            group.withdraw(members, failure)

    def add_inspectable(self, thing: Inspectable) -> None:
        """Ask `thing` for a snapshot at every dump from now on, as long as it lives."""
        self._inspectables = [
            reference for reference in self._inspectables if reference() is not None
        ]
        self._inspectables.append(weakref.ref(thing))

    @property
    def inspectables(self) -> list[Inspectable]:
        things = [reference() for reference in self._inspectables]
        return [thing for thing in things if thing is not None]

    def progress_token(self) -> tuple[object, ...]:
        """Return a value that changes with every progress of this rank; called often, from any
        thread.
        """
        calls = sum(group.calls for group in tuple(self.groups))
        tokens = (thing.progress_token() for thing in self.inspectables)
        return calls, self.long_waits_begun, self.ended, *tokens

    def advance(self) -> None:
        """Let everything advance that the calling thread has registered; never waits."""
        if self.advancing:
            thread = calling_thread()
            for thing, owner in tuple(self.advancing.items()):
                if owner == thread:
                    thing.progress()

    @property
    def single_threaded(self) -> bool:
        """Whether only the calling thread makes calls on this rank: other threads are daemons, if
        there are any.
        """
        thread = calling_thread()
        return self.alone or all(
            other.ident == thread or other.daemon for other in threading.enumerate()
        )


_contexts: list[RankContext] = []
_local = threading.local()


def current_rank() -> RankContext:
    """Return the state of the calling rank."""
    adopted: RankContext | None = getattr(_local, "context", None)
    if adopted is not None:
        return adopted
    if not _contexts:
        _contexts.append(RankContext())
    return _contexts[0]


def adopt(context: RankContext) -> None:
    """Make the calling thread a rank of its own, with this state."""
    context.alone = True
    context.thread = threading.get_ident()
    _local.context = context


_pid = os.getpid()


def is_rank() -> bool:
    """Return False in a process that was forked by the one which imported this package: MPI does
    not know it.
    """
    return os.getpid() == _pid


def finalized() -> bool:
    """Return whether it is too late for this rank to send anything: it is a process, and MPI is
    finalized.
    """
    mpi4py = sys.modules.get("mpi4py.MPI")
    return mpi4py is not None and not current_rank().alone and bool(mpi4py.Is_finalized())


def whoami() -> str:
    """Name this process in texts that other ranks read: its world rank where MPI runs, and its
    host.
    """
    mpi4py = sys.modules.get("mpi4py.MPI")
    rank = "a rank" if mpi4py is None else f"world rank {mpi4py.COMM_WORLD.rank}"
    return f"{rank} on {socket.gethostname()}"


def calling_thread() -> int:
    """Return the number of the calling thread, or of that in whose place it makes calls."""
    return getattr(_local, "in_place_of", None) or threading.get_ident()


@contextmanager
def in_place_of(thread: int | None) -> Iterator[None]:
    """Make the calls within in the place of another thread, which waits for their end; None: of no
    other.
    """
    before = getattr(_local, "in_place_of", None)
    _local.in_place_of = thread
    try:
        yield
    finally:
        _local.in_place_of = before


def register_progress(thing: Advancing) -> None:
    """Call `thing.progress()` in every wait of this thread, until `unregister_progress`: a peer may
    depend on it.
    """
    current_rank().advancing[thing] = calling_thread()


def unregister_progress(thing: Advancing) -> None:
    """End `register_progress`."""
    current_rank().advancing.pop(thing, None)


# -- What one rank of a group knows of the others: who has failed, who has left, who waits for whom, who is missing --
#
# The ranks of a group make the same collective calls in the same order, and each counts its own: 1,
# 2, 3, ... A control message (ControlKind) names the call that it is about, so the receiver can
# compare it with its own count. Only long waits send WAITING, HERE and ELSEWHERE, each once a call,
# so the messages are few.


class OpenGroup:
    """What a rank knows of the others of a group, and tells them; job.group.RankGroup adds what
    they do together.

    `members` are the ranks of `comm` in COMM_WORLD. No method here waits.
    """

    def __init__(self, comm: Communicator, members: tuple[int, ...], context: RankContext) -> None:
        self.comm = comm
        self.members = members
        self.context = context
        self.rank = comm.rank
        self.size = comm.size
        self.world_rank = members[comm.rank]
        self.messages = ControlMessages(comm)
        self.key: tuple[int, ...] = ()  # names this group on all its ranks alike
        self.related: list[Any] = []  # groups of the same object, whose failure is this one's too
        self.progress: Callable[[], str] | None = (
            None  # how far this rank has come, for peers that will miss it
        )
        self.calls = 0  # collective calls of the group that this rank has begun
        self.closed = self.has_left = False
        self.closing = False  # no rank sends messages about waits any more
        self.failure: Failure | None = None  # why the group cannot be used any more
        self.elsewhere: ControlMessage | None = (
            None  # from rank 0, which waits for this rank in another call
        )
        self.left: dict[
            int, tuple[int, str]
        ] = {}  # rank -> (calls, text), where its script has ended
        self.makers: dict[
            int, Maker
        ] = {}  # the last word of each rank that waits to have a communicator made
        self.told_making: dict[
            int, tuple[Making, Making]
        ] = {}  # the same of this rank, by whom it was sent to
        self.on_the_way = (
            0  # such messages that this rank has sent, less those that it has received
        )
        self.told = self.told_elsewhere = (
            0  # calls for which a message WAITING, or ELSEWHERE, was sent
        )
        self.sent = self.answers = (
            0  # messages WAITING that this rank has sent to rank 0, and its answers
        )
        # on rank 0: messages WAITING of all others; the last of each, as (call, text); calls
        # without an answer yet
        self.received = 0
        self.waiting: dict[int, tuple[int, str]] = {}
        self.unanswered: dict[int, int] = {}

    @property
    def usable(self) -> bool:
        """Whether messages can still be sent on `comm`."""
        return not self.closed and not finalized()

    def begin(self) -> None:
        if not self.usable:
            raise ArgumentError(
                "the communicator is gone",
                found="a call on a communicator that was freed, or after MPI_Finalize",
                remedy="free communicators, and finalize MPI, after the last call that uses them",
            )
        if self.failure is not None:
            raise peer_error(
                self.failure, remedy="start the job anew: an earlier call of these ranks has failed"
            )
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
                self._send_all(ControlKind.FAILED, failure.number, failure.text)

    def leave(self) -> None:
        """Tell the peers, once, that the script ends, so that they do not wait for this rank after
        the current call.
        """
        if self.usable and not self.has_left:
            self.has_left = True
            calls = f"collective call {self.calls}" if self.progress is None else self.progress()
            text = f"rank {self.rank} ({whoami()}) left the job after {calls}"
            with self.context.lock:
                self._send_all(ControlKind.LEFT, self.calls, text)

    def withdraw(self, members: Container[int], failure: Failure) -> None:
        """Tell the world ranks `members` that this one makes no communicator with them any more."""
        if self.usable:
            with self.context.lock:
                self._send_all(ControlKind.WITHDRAWN, failure.number, failure.text, members)

    def _send_all(
        self, kind: ControlKind, number: int, text: str, members: Container[int] | None = None
    ) -> None:
        for peer, member in enumerate(self.members):
            if peer != self.rank and (
                members is None or (member in members and member not in self.context.left)
            ):
                self.messages.send(peer, kind, number, text)

    def _detach(self) -> None:
        context = self.context
        with context.lock:
            if self in context.groups:
                context.groups.remove(self)
                if (
                    self.failure is not None
                ):  # its messages are still read; of groups of the same ranks two are enough
                    same = [other for other in context.failed if other.members == self.members]
                    context.failed = [
                        other for other in context.failed if other not in same[:-1]
                    ] + [self]

    def read_messages(self) -> None:
        """Take in the messages of the peers that have arrived, and answer those that ask."""
        for message in self.messages.read():
            self._take(message)
        for peer, call in tuple(self.unanswered.items()):
            if call <= self.calls:
                del self.unanswered[peer]
                self.messages.send(peer, ControlKind.HERE, call, "")
        for peer, (call, text) in self.left.items():
            if call < self.calls and self.failure is None:
                missed = Failure(-1 - self.members[peer], text)
                self._fail(missed)
                self.context.add_failure(missed)
        if self.failure is not None:
            self._detach()

    def _take(self, message: ControlMessage) -> None:
        kind, source, call, text = message
        if kind == ControlKind.FAILED:
            if (
                self.failure is None
            ):  # else this rank has raised what ended the group, and may have gone on since
                self.failure = Failure(call, text)
                self.context.add_failure(self.failure)
        elif kind == ControlKind.LEFT:
            self.left[source] = call, text
            self.context.left[self.members[source]] = text
        elif kind == ControlKind.WITHDRAWN:
            self.context.withdrawn[self.members[source]] = Failure(call, text)
        elif kind == ControlKind.MAKING:
            *numbers, text = text.split(" ", 4)
            code, number, answered, count = map(int, numbers)
            self.on_the_way -= 1
            self.makers[source] = Maker(call, Making(code, number), Making(answered, count), text)
        elif kind == ControlKind.WAITING:
            self.received += 1
            if (
                source in self.unanswered
            ):  # it has gone on from there, so this rank has been there, too
                self.messages.send(source, ControlKind.HERE, self.unanswered[source], "")
            self.waiting[source] = call, text
            self.unanswered[source] = call
        elif kind == ControlKind.HERE:
            self.answers += 1
        else:
            self.elsewhere = message

    def settled(self, messages: int) -> bool:
        """Return whether all `messages` to rank 0 have been received and answered, and all that was
        sent has left.
        """
        with self.context.lock:
            self.read_messages()
            complete = self.answers == self.sent if self.rank else self.received == messages
            return complete and not self.unanswered and self.messages.all_sent()

    def tell_leader(self, what: str) -> None:
        """Tell rank 0, once a call, that this rank waits for all others."""
        if self.rank > 0 and self.told < self.calls and not self.closing:
            with self.context.lock:
                self.told = self.calls
                self.sent += 1
                self.messages.send(0, ControlKind.WAITING, self.calls, what)

    def tell_who_waits_here(self, mine: OpenGroup, what: str) -> None:
        """Tell one rank that waits for this one in this group that this one waits for it in the
        group of `mine`.
        """
        for peer, call in self.unanswered.items():
            member = self.members[peer]
            if (
                call > self.calls
                and member in mine.members
                and mine.told_elsewhere < mine.calls
                and not mine.closing
            ):
                mine.told_elsewhere = mine.calls
                mine.messages.send(
                    mine.members.index(member), ControlKind.ELSEWHERE, mine.calls, what
                )

    def absent_maker(self, peer: int) -> Maker | None:
        """Return what a rank waits for if that is a communicator which this rank has not begun to
        make.
        """
        maker = self.makers.get(peer)
        begun = maker is None or maker.making.number <= self.context.makings[maker.making.code]
        return None if begun else maker

    def tell_making(self, making: Making, what: str, absent: Container[int]) -> None:
        """Tell ranks that this one waits for them to make a communicator, and again if they wait
        for another one.
        """
        following = range(self.rank + 1, self.rank + min(self.size, MOST_TOLD))
        for peer in (number % self.size for number in following):
            maker = self.absent_maker(peer)
            words = making, Making(0, 0) if maker is None else maker.making
            if (
                self.members[peer] in absent
                and self.told_making.get(peer) != words
                and not self.closing
            ):
                self.told_making[peer] = words
                self.on_the_way += 1
                self.messages.send(
                    peer,
                    ControlKind.MAKING,
                    self.calls,
                    " ".join(map(str, (*sum(words, ()), what))),
                )

    def describe_missing(self) -> str:
        """Name the ranks that have not come to the call under way; "" where this rank does not
        know.
        """
        if self.rank > 0:
            return "" if self.answers == self.sent else "nothing was heard of rank 0"
        missing = [
            rank for rank in range(1, self.size) if self.waiting.get(rank, (0, ""))[0] < self.calls
        ]
        if not missing:
            return ""
        # World rank -> text, of ranks that wait for this one in another group, and so must still do
        # so.
        others = {
            group.members[peer]: group.waiting[peer][1]
            for group in self.context.groups
            for peer, call in group.unanswered.items()
            if call > group.calls
        }
        ranks_of = rank_list.by_text((rank, others.get(self.members[rank], "")) for rank in missing)
        listed = [
            rank_list.named(ranks)
            + (f" (wait{'s' if len(ranks) == 1 else ''} for {text})" if text else "")
            for text, ranks in ranks_of.items()
        ]
        most = rank_list.LISTED
        more = (
            f" and {sum(map(len, list(ranks_of.values())[most:]))} more"
            if len(listed) > most
            else ""
        )
        return f"missing: {', '.join(listed[:most])}{more}"


# -- Control messages: of fixed size, so small that every MPI takes one at once, whether anybody receives it or not.
#    So telling others never waits, not even for a rank that is itself about to end.


MESSAGE_BYTES = 1024
MOST_TOLD = 64  # ranks of a group that one tells that it makes a communicator: those that follow it
HEAD = 3  # int64 numbers before the text: kind, source, call


class ControlKind(IntEnum):
    """What a control message says."""

    FAILED = 0  # the sender cannot go on with this group; `call` is the number of the failure
    # The sender's script has ended after `call`: a receiver in a later one would wait for ever, and
    # fails.
    LEFT = 1
    WAITING = (
        2  # the sender waits for all ranks in `call`; goes to rank 0, which so knows who is missing
    )
    HERE = 3  # the answer: rank 0 has come to `call`, too
    # The sender waits for the receiver in `call` of this group, and the receiver waits in another.
    ELSEWHERE = 4
    # The sender waits for the receiver to make a communicator with it; `call` is the sender's last
    # one.
    MAKING = 6
    # The sender makes no communicator with the receiver any more; `call` is the number of a
    # failure.
    WITHDRAWN = 5


class ControlMessage(NamedTuple):
    """A control message that was received."""

    kind: ControlKind
    source: int
    call: int
    text: str


class ControlMessages:
    """The control messages of one rank on a private communicator without any other point-to-point
    message.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sending: list[Request] = []
        self.receiving: tuple[Request, np.ndarray] | None = (
            None  # a message that has arrived, and its buffer
        )

    def send(self, peer: int, kind: ControlKind, call: int, text: str) -> None:
        """Start sending; never waits. A text that is too long is cut."""
        message = np.zeros(MESSAGE_BYTES, np.uint8)
        message[: 8 * HEAD].view(np.int64)[:] = kind, self.comm.rank, call
        data = np.frombuffer(
            text.encode("utf-8", "backslashreplace")[: MESSAGE_BYTES - 8 * HEAD], np.uint8
        )
        message[8 * HEAD :][: data.size] = data
        self.all_sent()
        self.sending.append(own(self.comm.Isend(message, peer, 0)))

    def read(self) -> list[ControlMessage]:
        """Return all messages that have arrived; never waits."""
        if self.sending:
            self.all_sent()  # drops those that have left
        arrived = []
        while self.receiving is not None or self.comm.Iprobe():
            if self.receiving is None:
                buffer = np.empty(MESSAGE_BYTES, np.uint8)
                self.receiving = own(self.comm.Irecv(buffer)), buffer
            request, message = self.receiving
            if not request.Test():
                break
            self.receiving = None
            kind, source, call = message[: 8 * HEAD].view(np.int64).tolist()
            text = message[8 * HEAD :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
            arrived.append(ControlMessage(ControlKind(kind), source, call, text))
        return arrived

    def all_sent(self) -> bool:
        """Return whether every message has left this rank."""
        self.sending = [request for request in self.sending if not request.Test()]
        return not self.sending
