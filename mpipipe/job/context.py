"""The state of one rank, for all of its threads, and what it knows of the others of each group.

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
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import settings
from mpipipe.job.control import ControlKind, ControlMessage, ControlMessages
from mpipipe.job.flight import Inspectable
from mpipipe.job.types import Advancing, Communicator, GroupName, Ranks, RankWait
from mpipipe.trace import Recorder

if TYPE_CHECKING:
    from mpipipe.job.watch.watchdog import Watchdog

# Seconds for which a wait gives way to others before it sleeps: the time of a large message.
YIELD_SECONDS = 2e-2
PAUSE_SECONDS = 5e-5  # between two polls of a wait that sleeps
# The same where ranks share cores, and another rank has better use for this one.
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


_count = itertools.count(1)
MAKING = 1 << 62


def failure_of(error: BaseException, text: str, world_rank: int, making: bool = False) -> Failure:
    """Return the failure that an exception carries, or a new one of this rank."""
    known = getattr(error, "failure", None)
    if not isinstance(known, Failure):
        known = Failure((world_rank + 1 << 32) + next(_count) + making * MAKING, text)
        with suppress(Exception):  # some classes of exceptions take no attributes
            error.failure = known  # type: ignore[attr-defined]
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
        self.lock = threading.RLock()  # while control messages are read
        # Open groups: every wait of this rank reads the control messages of all of them.
        self.groups: list[OpenGroup] = []
        self.failed: list[OpenGroup] = []  # their messages still say who has left
        # What waits must call -> the thread whose waits call it.
        self.advancing: dict[Advancing, int] = {}
        self.failures: list[Failure] = []  # each once; a wait looks for news at the end
        self.left: dict[int, str] = {}  # world rank -> text, for ranks whose script has ended
        # By world ranks with which this one makes no communicator any more.
        self.withdrawn: dict[int, Failure] = {}
        # Communicators that this rank has begun to make, by the name of their ranks.
        self.makings: dict[GroupName, int] = defaultdict(int)
        self.pipelines = 0  # built so far
        self.is_thread = False
        self.thread = threading.main_thread().ident  # the thread that is this rank
        self.patience = YIELD_SECONDS
        self.pause = PAUSE_SECONDS
        if settings.oversubscribed():
            self.patience = OVERSUBSCRIBED_YIELD_SECONDS
            self.pause = OVERSUBSCRIBED_PAUSE_SECONDS
        self.long_waits: list[RankWait] = []  # one for each thread that waits
        self.long_waits_begun = 0
        self.watchdog: Watchdog | None = None  # None before the first group
        self.watch_limit = settings.watchdog()  # seconds without progress that are a hang
        self.report_folder: Path | None = None  # for a report of one; None: the working folder
        self.ended = False  # whether the program of this rank is over
        self.unwritten = False  # some output could not be written: its exit code is 1 then
        self.recorders: set[Recorder] = set()  # note the waits of this rank
        self._inspectables: list[weakref.ref[Inspectable]] = []

    def add_failure(self, failure: Failure) -> None:
        """Note that a peer has failed: every wait under way on this rank ends."""
        for known in self.failures:
            if known.number == failure.number:
                return
        self.failures.append(failure)

    def withdraw(self, members: Collection[int], error: BaseException) -> None:
        """Make no communicator with `members` any more: an error ended the making of one.

        They learn of it in all groups, also those that have failed. That one of them has left is
        known without this.
        """
        groups = (*self.groups, *self.failed)
        number = getattr(getattr(error, "failure", None), "number", 0)
        if not groups or not is_rank() or number < 0 or number & MAKING:
            return
        world_rank = groups[0].world_rank
        text = f"world rank {world_rank} made no communicator: {type(error).__name__}: {error}"
        failure = failure_of(error, text, world_rank)
        for member in set(members) - {world_rank}:
            self.withdrawn[member] = failure
        for group in groups:
            group.send_all(ControlKind.WITHDRAWN, failure, set(members) - self.left.keys())

    def add_inspectable(self, thing: Inspectable) -> None:
        """Ask `thing` for a snapshot at every dump from now on, as long as it lives."""
        self._inspectables = [weakref.ref(living) for living in (*self.inspectables, thing)]

    @property
    def inspectables(self) -> list[Inspectable]:
        living = []
        for reference in self._inspectables:
            thing = reference()
            if thing is not None:
                living.append(thing)
        return living

    def progress_token(self) -> tuple[object, ...]:
        """Return a value that changes with every progress of this rank; from any thread."""
        calls = 0
        for group in tuple(self.groups):
            calls += group.calls
        tokens: list[object] = [calls, self.long_waits_begun, self.ended]
        for thing in self.inspectables:
            tokens.append(thing.progress_token())
        return tuple(tokens)

    def advance(self) -> None:
        """Let everything advance that the calling thread has registered; never waits."""
        if self.advancing:
            thread = calling_thread()
            for thing, owner in tuple(self.advancing.items()):
                if owner == thread:
                    thing.progress()

    def single_threaded(self, thread: int | None) -> bool:
        """Return whether this thread alone makes calls on this rank: others are daemons."""
        if self.is_thread:
            return True
        for other in threading.enumerate():
            if other.ident != thread and not other.daemon:
                return False
        return True


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
    context.is_thread = True
    context.thread = threading.get_ident()
    _local.context = context


_pid = os.getpid()


def is_rank() -> bool:
    """Return False in a forked child: MPI does not know it."""
    return os.getpid() == _pid


def finalized() -> bool:
    """Return whether MPI is finalized, so that this rank can send nothing any more."""
    mpi4py = sys.modules.get("mpi4py.MPI")
    return mpi4py is not None and not current_rank().is_thread and bool(mpi4py.Is_finalized())


def whoami() -> str:
    """Name this process in texts for other ranks: its world rank where MPI runs, and its host."""
    mpi4py = sys.modules.get("mpi4py.MPI")
    rank = "a rank"
    if mpi4py is not None:
        rank = f"world rank {mpi4py.COMM_WORLD.rank}"
    return f"{rank} on {socket.gethostname()}"


def calling_thread() -> int:
    """Return the number of the calling thread, or of that in whose place it makes calls."""
    return getattr(_local, "in_place_of", None) or threading.get_ident()


@contextmanager
def in_place_of(thread: int | None) -> Iterator[None]:
    """Make calls in the place of another thread, which waits for their end; None: of no other."""
    before = getattr(_local, "in_place_of", None)
    _local.in_place_of = thread
    try:
        yield
    finally:
        _local.in_place_of = before


def register_progress(thing: Advancing) -> None:
    """Call `thing.progress()` in every wait of this thread: a peer may depend on it."""
    current_rank().advancing[thing] = calling_thread()


def unregister_progress(thing: Advancing) -> None:
    """End `register_progress`."""
    current_rank().advancing.pop(thing, None)


# -- What one rank of a group knows of the others: who has failed, and who has left ----------------
#
# The ranks of a group make the same collective calls in the same order, and each counts its own: 1,
# 2, 3, ... So a rank that has left after call 7 is missed in call 8.


class OpenGroup:
    """The life of a group, as its ranks learn of it; job.group.RankGroup adds its calls.

    `members` are the ranks of `comm` in COMM_WORLD. No method here waits.
    """

    def __init__(self, comm: Communicator, members: Ranks, context: RankContext) -> None:
        self.comm = comm
        self.members = members
        self.context = context
        self.rank = comm.rank
        self.size = comm.size
        self.world_rank = members[comm.rank]
        self.messages = ControlMessages(comm)
        self.key: GroupName = ()  # names this group on all its ranks alike
        # Groups of the same object, whose failure is this one's too.
        self.related: Sequence[OpenGroup] = []
        # Says how far this rank has come, for peers that will miss it.
        self.progress: Callable[[], str] | None = None
        self.calls = 0  # collective calls of the group that this rank has begun
        self.closed = False
        self.has_left = False
        self.failure: Failure | None = None  # why the group cannot be used any more
        # rank -> (calls, text), where its script has ended
        self.left: dict[int, tuple[int, str]] = {}

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
                self.send_all(ControlKind.FAILED, failure)

    def leave(self) -> None:
        """Tell the peers, once, that the script ends, so that none waits for this rank."""
        if self.usable and not self.has_left:
            self.has_left = True
            calls = f"collective call {self.calls}"
            if self.progress is not None:
                calls = self.progress()
            text = f"rank {self.rank} ({whoami()}) left the job after {calls}"
            self.send_all(ControlKind.LEFT, Failure(self.calls, text))

    def send_all(
        self, kind: ControlKind, failure: Failure, members: Container[int] | None = None
    ) -> None:
        """Send a control message to all other ranks, or to these world ranks."""
        if not self.usable:
            return
        with self.context.lock:
            for peer, member in enumerate(self.members):
                if peer != self.rank and (members is None or member in members):
                    self.messages.send(peer, kind, *failure)

    def _detach(self) -> None:
        """Take the group out of the open ones; one that has failed is still read."""
        context = self.context
        with context.lock:
            if self not in context.groups:
                return
            context.groups.remove(self)
            if self.failure is not None:
                # Of groups of the same ranks two are enough.
                same = []
                for other in context.failed:
                    if other.members == self.members:
                        same.append(other)
                for other in same[:-1]:
                    context.failed.remove(other)
                context.failed.append(self)

    def read_messages(self) -> None:
        """Take in the messages of the peers that have arrived."""
        for message in self.messages.read():
            self._take(message)
        for peer, (call, text) in self.left.items():
            if call < self.calls and self.failure is None:
                missed = Failure(-1 - self.members[peer], text)
                self._fail(missed)
                self.context.add_failure(missed)
        if self.failure is not None:
            self._detach()

    def _take(self, message: ControlMessage) -> None:
        kind, source, number, text = message
        if kind == ControlKind.LEFT:
            self.left[source] = number, text
            self.context.left[self.members[source]] = text
        elif kind == ControlKind.WITHDRAWN:
            self.context.withdrawn[self.members[source]] = Failure(number, text)
        elif self.failure is None:
            # else this rank has raised what ended the group, and may have gone on since
            self.failure = Failure(number, text)
            self.context.add_failure(self.failure)
