"""The state of one rank, for all of its threads.

A rank is a process, or a thread of `job.inprocess`, which calls `adopt`; `current_rank()` is the
calling rank's state.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from mpipipe.errors import PeerError
from mpipipe.job import settings
from mpipipe.job.types import Advancing, GroupName, Inspectable
from mpipipe.trace import Recorder

if TYPE_CHECKING:
    from mpipipe.job.group import RankGroup
    from mpipipe.job.wait import LongWait
    from mpipipe.job.watch.watchdog import Watchdog

# Seconds for which a wait gives way to others before it sleeps: the time of a large message.
YIELD_SECONDS = 2e-2
MOST_FAILED = 64  # groups that have failed, whose messages are read
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
        self.groups: list[RankGroup] = []
        # The messages of groups that have failed still say who has left.
        self.failed: deque[RankGroup] = deque(maxlen=MOST_FAILED)
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
        self.long_waits: list[LongWait] = []  # one for each thread that waits
        self.long_waits_begun = 0
        self.watchdog: Watchdog | None = None  # None before the first group
        self.watch_limit = settings.WATCHDOG.limit  # seconds without progress that are a hang
        self.ended = False  # whether the program of this rank is over
        self.unwritten = False  # some output could not be written: its exit code is 1 then
        self.recorders: set[Recorder] = set()  # note the waits of this rank
        self._inspectables: WeakValueDictionary[int, Inspectable] = WeakValueDictionary()

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
            group.send_all("withdrawn", failure, set(members) - self.left.keys())

    def add_inspectable(self, thing: Inspectable) -> None:
        """Ask `thing` for a snapshot at every dump from now on, as long as it lives."""
        self._inspectables[next(_count)] = thing

    @property
    def inspectables(self) -> list[Inspectable]:
        living = []
        for reference in self._inspectables.valuerefs():
            thing = reference()
            if thing is not None:
                living.append(thing)
        return living

    def progress_token(self) -> tuple[object, ...]:
        """Return a value that changes with every progress of this rank; from any thread."""
        calls = sum(group.calls for group in tuple(self.groups))
        tokens = [thing.progress_token() for thing in self.inspectables]
        return calls, self.long_waits_begun, self.ended, *tokens

    def advance(self) -> None:
        """Let everything advance that the calling thread has registered; never waits."""
        if self.advancing:
            thread = calling_thread()
            for thing, owner in tuple(self.advancing.items()):
                if owner == thread:
                    thing.progress()

    def single_threaded(self, thread: int | None) -> bool:
        """Return whether this thread alone makes calls on this rank: others are daemons."""
        return self.is_thread or not other_threads(thread)


def other_threads(thread: int | None) -> list[threading.Thread]:
    """Return the other threads that the end of the interpreter waits for."""
    return [x for x in threading.enumerate() if x.ident != thread and not x.daemon]


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
