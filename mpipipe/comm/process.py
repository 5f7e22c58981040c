"""What one rank knows, whichever of its threads asks: its groups, news of other ranks, and what must progress.

A rank is a process. In `comm.inprocess` it is a thread, which says so by `adopt`.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from mpipipe.comm import launcher

YIELD_SECONDS = 2e-2  # how long a wait gives way to others before it sleeps: the time of a large message
CROWDED_YIELD_SECONDS = 1e-3  # the same where ranks share cores, and another rank has better use for this one


class Failure(NamedTuple):
    """What a rank could not go on for; `number` is the same wherever it is heard of."""

    number: int
    text: str


def failure_of(error: BaseException, text: str, world_rank: int) -> Failure:
    """The failure that an exception stands for: the one that was heard of, or a new one of this rank."""
    known = getattr(error, "failure", None)
    if not isinstance(known, Failure):
        known = Failure((world_rank + 1 << 32) + next(_count), text)
        with suppress(Exception):  # some classes of exceptions take no attributes
            error.failure = known  # type: ignore[attr-defined]
    return known


_count = itertools.count(1)


class Process:
    """The state of one rank.

    Attributes
    ----------
    lock : held while notes are read
    groups : open group.Group objects, whose notes every wait of this rank reads
    engines : what must be called to advance -> the thread that uses it
    failures : those heard of, in that order
    left : world rank -> text, of the ranks whose script has ended
    pipelines : built so far
    patience : seconds that a wait gives way to others before it sleeps
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.groups: list[Any] = []
        self.engines: dict[Any, int] = {}
        self.failures: list[Failure] = []
        self.left: dict[int, str] = {}
        self.numbers: set[int] = set()  # of the failures
        self.pipelines = 0
        self.alone = False  # a thread that is a rank
        self.patience = CROWDED_YIELD_SECONDS if launcher.oversubscribed() else YIELD_SECONDS

    def hear(self, failure: Failure):
        """A peer has failed: every wait under way on this rank ends. News of a failure that is known ends nothing."""
        if failure.number not in self.numbers:
            self.numbers.add(failure.number)
            self.failures.append(failure)

    def drive(self):
        """Let the engines of this thread advance."""
        thread = threading.get_ident()
        for engine, owner in tuple(self.engines.items()):
            if owner == thread:
                engine.progress()

    @property
    def single_threaded(self) -> bool:
        """Whether this thread does all that this rank does; daemon threads, as of progress bars, do not count."""
        here = threading.current_thread()
        return self.alone or all(thread is here or thread.daemon for thread in threading.enumerate())


_processes: list[Process] = []
_local = threading.local()


def here() -> Process:
    """The state of this rank."""
    own = getattr(_local, "process", None)
    if own is not None:
        return own
    if not _processes:
        _processes.append(Process())
    return _processes[0]


def adopt(process: Process):
    """The calling thread is a rank of its own from now on, with this state."""
    process.alone = True
    _local.process = process


def is_rank() -> bool:
    """False in a process that was forked by the one which imported this package: MPI does not know it."""
    return os.getpid() == _pid


_pid = os.getpid()


def register_progress(engine):
    """Call `engine.progress()` in every wait of this thread, until `unregister_progress`: a peer may wait for it."""
    here().engines[engine] = threading.get_ident()


def unregister_progress(engine):
    """End `register_progress`."""
    here().engines.pop(engine, None)
