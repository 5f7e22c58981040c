"""The state of one rank, for all of its threads: its groups, failures of other ranks, and what its waits advance.

A rank is a process, or a thread of `job.inprocess`, which calls `adopt`. `current_rank()` is the state of the calling
rank in both cases.

    groups      open groups; every wait of this rank reads the notes of all of them
    failed      groups that have failed; their notes still say who has left, or has withdrawn
    failures    failures that this rank has heard of; a wait looks for news at the end of this list
    advancing   things that advance only while somebody calls them; every wait calls those of its own thread
    flight      the last operations of this rank
    long_waits  its long waits
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Collection, Container
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpipipe.job import settings
from mpipipe.job.flight import FlightRecorder, Inspectable
from mpipipe.job.types import Advancing
from mpipipe.trace import Recorder

YIELD_SECONDS = 2e-2  # how long a wait gives way to others before it sleeps: the time of a large message
PAUSE_SECONDS = 5e-5  # how long it then sleeps between two polls: short beside any real stage
# the same where ranks share cores, and another rank has better use for this one
OVERSUBSCRIBED_YIELD_SECONDS, OVERSUBSCRIBED_PAUSE_SECONDS = 1e-3, 5e-4


class Failure(NamedTuple):
    """Why a rank could not go on; `number` is the same wherever it is heard of.

    The number is positive for an error, and -1 minus the world rank for a rank that has left. It has the bit MAKING
    where all ranks come out of the same constructor by it, so that they can make what they want anew.
    """

    number: int
    text: str


def failure_of(error: BaseException, text: str, world_rank: int, making: bool = False) -> Failure:
    """The failure that an exception stands for: the one that was heard of, or a new one of this rank."""
    known = getattr(error, "failure", None)
    if not isinstance(known, Failure):
        known = Failure((world_rank + 1 << 32) + next(_count) + making * MAKING, text)
        with suppress(Exception):  # some classes of exceptions take no attributes
            error.failure = known  # type: ignore[attr-defined]  # any exception may carry it to the next group
    return known


_count = itertools.count(1)
MAKING = 1 << 62


class OpenGroup(Protocol):
    """What a rank asks of each of its groups; job.group.Group is one."""

    @property
    def peers(self) -> Any: ...  # job.peers.PeerStatus, which is built on this module

    def read_messages(self) -> None: ...

    def fail(self, error: BaseException, text: str, making: bool = False) -> None: ...

    def leave(self) -> None: ...

    def withdraw(self, members: Container[int], failure: Failure) -> None: ...

    @property
    def world_rank(self) -> int: ...


class HangWatcher(Protocol):
    """Watches for a hang; job.watch.watchdog.Watchdog is one."""

    limit: float | None  # seconds without progress
    folder: Path | None  # of a report

    def configure(self, limit: float | None, folder: Path | None) -> None: ...

    def look(self) -> None:
        """Look around; called in long waits."""

    def ended_neighbours(self) -> set[int]: ...

    def forget(self) -> None:
        """Watch over nobody: ranks have died, and the others make new groups."""

    def stop(self) -> None: ...


class RankContext:
    """The state of one rank.

    Attributes
    ----------
    lock : RLock
        Held while notes are read.
    groups : list of group.Group
        The open groups.
    failed : list of group.Group
        The last groups of each set of ranks that have failed.
    advancing : dict
        Thing that waits advance -> the thread that has registered it.
    failures : list of Failure
        Failures that this rank has heard of, in that order, each once.
    left : dict
        World rank -> text, for each rank whose script has ended.
    withdrawn : dict
        World rank -> Failure, for each rank with which this one makes no communicator any more.
    pipelines, groups_named : int
        Pipelines built, and groups made, so far.
    alone : bool
        Whether this rank is a thread.
    thread : int
        The thread that is this rank; the main thread if the rank is a process.
    patience, pause : float
        Seconds that a wait gives way to others before it sleeps, and that it then sleeps between two polls.
    flight : FlightRecorder
        The last operations that are in no plan.
    long_waits : list of wait.LongWait
        The long waits under way, one for each thread that waits.
    watchdog : HangWatcher or None
        Watches for a hang, once there is a group of several ranks.
    ended : bool
        Whether the program of this rank is over.
    unwritten : bool
        Whether some of the program's output could not be written: its exit code is 1 then.
    lifeline : lifeline.Lifeline or None
        Knows of ranks that have died, where MPI tells.
    recorders : set of trace.Recorder
        Recorders that note the waits of this rank.
    owners : list of checkpoint.owner.Owner
        Folders that the job of this rank owns.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.groups: list[OpenGroup] = []
        self.failed: list[OpenGroup] = []
        self.advancing: dict[Advancing, int] = {}
        self.failures: list[Failure] = []
        self.left: dict[int, str] = {}
        self.withdrawn: dict[int, Failure] = {}
        self.pipelines = self.groups_named = 0
        self.alone, self.thread = False, threading.main_thread().ident
        self.patience, self.pause = YIELD_SECONDS, PAUSE_SECONDS
        if settings.oversubscribed():
            self.patience, self.pause = OVERSUBSCRIBED_YIELD_SECONDS, OVERSUBSCRIBED_PAUSE_SECONDS
        self.flight = FlightRecorder()
        self.long_waits: list[Any] = []  # of wait.LongWait, which is built on this module
        self.long_waits_begun = 0
        self.watchdog: HangWatcher | None = None
        self.ended = self.unwritten = False
        self.lifeline: Any = None  # a lifeline.Lifeline, which is built on this module
        self.recorders: set[Recorder] = set()
        self.owners: list[Any] = []  # of checkpoint.owner.Owner, which is built on this module
        self._inspectables: list[weakref.ref[Inspectable]] = []
        self._known: set[int] = set()  # numbers of `failures`

    def add_failure(self, failure: Failure) -> None:
        """Take note that a peer has failed: every wait under way on this rank ends. A known failure ends nothing."""
        if failure.number not in self._known:
            self._known.add(failure.number)
            self.failures.append(failure)

    def withdraw(self, members: Collection[int], error: BaseException) -> None:
        """Make no communicator with the world ranks `members` any more, since an error ended the making of one.

        They are told in all groups, also those that have failed. That one of them has left is known without this.
        """
        groups, number = (*self.groups, *self.failed), getattr(getattr(error, "failure", None), "number", 0)
        if not groups or not is_rank() or number < 0 or number & MAKING:
            return
        own = groups[0].world_rank
        failure = failure_of(error, f"world rank {own} made no communicator: {type(error).__name__}: {error}", own)
        self.withdrawn.update((member, failure) for member in members if member != own)
        for group in groups:
            group.withdraw(members, failure)

    def keep_failed(self, group: OpenGroup) -> None:
        """Read the notes of a failed group from now on; of groups of the same ranks, the last two are enough."""
        same = [other for other in self.failed if other.peers.members == group.peers.members]
        self.failed = [other for other in self.failed if other not in same[:-1]] + [group]

    def add_inspectable(self, thing: Inspectable) -> None:
        """Ask `thing` for an account at every dump from now on, as long as it lives."""
        self._inspectables = [each for each in self._inspectables if each() is not None]
        self._inspectables.append(weakref.ref(thing))

    @property
    def inspectables(self) -> list[Inspectable]:
        """The things that are asked for an account and still live."""
        found = [each() for each in self._inspectables]
        return [thing for thing in found if thing is not None]

    def progress_token(self) -> tuple[object, ...]:
        """Return a value that changes with every progress of this rank."""
        calls = sum(group.peers.calls for group in tuple(self.groups))
        return (
            calls,
            self.flight.count,
            self.long_waits_begun,
            self.ended,
            *(t.progress_token() for t in self.inspectables),
        )

    def advance(self) -> None:
        """Advance what this thread has registered."""
        thread = threading.get_ident()
        for thing, owner in tuple(self.advancing.items()):
            if owner == thread:
                thing.progress()

    @property
    def single_threaded(self) -> bool:
        """Whether this thread does all that this rank does. Daemon threads, as of progress bars, do not count."""
        current_rank = threading.current_thread()
        return self.alone or all(thread is current_rank or thread.daemon for thread in threading.enumerate())


_contexts: list[RankContext] = []
_local = threading.local()


def current_rank() -> RankContext:
    """The state of the calling rank."""
    adopted: RankContext | None = getattr(_local, "context", None)
    if adopted is not None:
        return adopted
    if not _contexts:
        _contexts.append(RankContext())
    return _contexts[0]


def adopt(context: RankContext) -> None:
    """Make the calling thread a rank of its own, with this state."""
    context.alone, context.thread = True, threading.get_ident()
    _local.context = context


def is_rank() -> bool:
    """False in a process that was forked by the one which imported this package: MPI does not know it."""
    return os.getpid() == _pid


_pid = os.getpid()


def register_progress(thing: Advancing) -> None:
    """Call `thing.progress()` in every wait of this thread, until `unregister_progress`: a peer may depend on it."""
    current_rank().advancing[thing] = threading.get_ident()


def unregister_progress(thing: Advancing) -> None:
    """End `register_progress`."""
    current_rank().advancing.pop(thing, None)
