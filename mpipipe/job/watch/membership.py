"""Which ranks watch over each other: every new group is in some channel, and every rank has one watchdog."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mpipipe.errors import HangError
from mpipipe.job import runtime, settings
from mpipipe.job.context import RankContext, current_rank
from mpipipe.job.inprocess import World
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, MpiCommunicator
from mpipipe.job.wait import wait_for_ranks
from mpipipe.job.watch.channel import make_dump, open_channel, threads_allowed, world_channel
from mpipipe.job.watch.verdict import REMEDY, judge
from mpipipe.job.watch.watchdog import STAGGER, Watchdog

ARRIVAL_SECONDS = 3.0  # for messages that a rank has sent before it left


def watch_world(world: MpiCommunicator) -> None:
    """Watch this rank from now on, also while it waits for the other ranks of its first group; not collective."""
    context = current_rank()
    if context.alone or context.watchdog is not None:
        return
    with context.lock:
        if context.watchdog is None:
            context.watchdog = Watchdog(context, world_channel(world))


def enrol(context: RankContext, comm: Communicator, members: tuple[int, ...]) -> tuple[int, ...]:
    """Name a new group on all its ranks alike, and make sure that one channel has all of them; collective.

    Parameters
    ----------
    process : Process
        Of this rank.
    comm : Communicator
        The group's private communicator.
    members : tuple of int
        Rank in COMM_WORLD of each rank.
    """
    context.groups_named += 1
    covered = _covered(context, comm, members)
    mine = np.array([covered, members[comm.rank], context.groups_named], np.int64)
    if comm.size == 1:
        return tuple(mine[1:].tolist())
    table = np.empty((comm.size, mine.size), np.int64)
    wait_for_ranks(own(comm.Iallgather(mine, table)), "all ranks of a new group", members, grace=ARRIVAL_SECONDS)
    if not table[:, 0].all():
        watchdog: Watchdog = context.watchdog  # type: ignore[assignment]  # ranks that are threads are covered
        watchdog.add(open_channel(comm, members, threads_allowed()))  # type: ignore[arg-type]  # of MPI, too
    return tuple(table[0, 1:].tolist())


def _covered(context: RankContext, comm: Communicator, members: tuple[int, ...]) -> bool:
    """Whether the watchdogs of these ranks need no further channel; makes that of this rank."""
    if runtime.in_process(comm):
        if context.watchdog is None:
            context.watchdog = ThreadWatchdog(comm.world, context)
        return True
    if context.watchdog is None:
        context.watchdog = Watchdog(context)
    watchdog: Watchdog = context.watchdog  # type: ignore[assignment]  # of a rank of MPI
    return comm.size == 1 or watchdog.covers(members)


@contextmanager
def watching(seconds: float | None, folder: Path) -> Iterator[None]:
    """Within, the limit of this rank is `seconds`, and a report goes to `folder`, if that exists by then.

    None stands for what MPIPIPE_WATCHDOG says, 0 for no watchdog. Every rank enters with the same.
    """
    watchdog = current_rank().watchdog
    if watchdog is None:  # no group was ever made
        yield
        return
    before = watchdog.limit, watchdog.folder
    watchdog.configure(settings.watchdog() if seconds is None else seconds or None, folder)
    try:
        yield
    finally:
        watchdog.configure(*before)


runtime.on_world.append(watch_world)


# -- The watchdog of ranks that are threads (job.inprocess): whoever waits looks at all of them, in their own memory


class ThreadWatchdog:
    """Watches while one rank waits. It has no thread: ranks that all compute are not watched.

    Parameters
    ----------
    world : World
        All ranks of one `inprocess.run`.
    process : Process
        Of this rank.
    """

    def __init__(self, world: World, context: RankContext) -> None:
        self.world, self.context = world, context
        self.limit = settings.watchdog()
        self.folder: Path | None = None
        self._token: object = None
        self._since = self._now = time.monotonic()

    def configure(self, limit: float | None, folder: Path | None) -> None:
        """Set the limit in seconds, None for no watchdog; reports of ranks that are threads need no folder."""
        self.limit, self.folder = limit, folder

    def forget(self) -> None:
        """Ranks that are threads do not outlive each other."""

    def stop(self) -> None:
        """There is no thread."""

    def ended_neighbours(self) -> set[int]:
        """None: a thread that has ended is known by its error."""
        return set()

    def look(self) -> None:
        """In a long wait: raise HangError if no rank has made progress for too long."""
        now = time.monotonic()
        if self.limit is None or now - self._now < self.limit / 20:
            return
        contexts: dict[int, RankContext] = dict(self.world.contexts)
        token = {rank: context.progress_token() for rank, context in contexts.items()}
        if token != self._token or now - self._now > self.limit / 2:  # the second: this wait is not the one before
            self._token, self._since = token, now
        self._now = now
        rank = next(rank for rank, context in contexts.items() if context is self.context)
        if now - self._since > self.limit * (1 + STAGGER * rank) and not self.world.broken:
            quiet = now - self._since
            dumps = {other: make_dump(context, other, quiet) for other, context in contexts.items()}
            raise HangError(
                f"no rank has made progress for {quiet:.1f} s", found="\n    ".join(judge(dumps).lines()), remedy=REMEDY
            )
