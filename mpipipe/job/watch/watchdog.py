"""Finds a hang: one watchdog on each rank, with a thread that speaks MPI, so that a rank that
computes answers too.

    quiet for the limit, and this rank waits           ask  ->  all ranks of its channel
    each says where it is, and how long it is quiet    <- Dump
    one has made progress                              no hang: ask again once that is the limit ago
    some are silent                                    ask  ->  another rank of their host, to look at their processes
    still no progress: compare, report, MPI_Abort

Progress is what changes `RankContext.progress_token`: a call, an action or a wait that begins or
ends, a poll between two layers. Time counts only while this watchdog is awake, so a job that was
stopped as a whole and goes on has not been quiet. Nothing is sent while ranks wait for less than
the limit.

Where MPI takes calls from one thread only, long waits do this in place of the thread. A rank that
computes is silent then, and the report says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import numpy as np

from mpipipe.errors import HangError
from mpipipe.job import runtime, settings
from mpipipe.job.communicators import ARRIVAL_SECONDS, wait_for_ranks
from mpipipe.job.context import RankContext, current_rank
from mpipipe.job.inprocess import World
from mpipipe.job.report import abort_job
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator
from mpipipe.job.watch.channel import (
    GONE,
    UNKNOWN,
    Dump,
    WatchChannel,
    WatchMessage,
    look_at,
    make_dump,
    open_channel,
    state_of,
    threads_allowed,
)
from mpipipe.job.watch.verdict import HUNG, REMEDY, Unresponsive, judge, publish

logger = logging.getLogger("mpipipe")
STAGGER = 0.2  # seconds between ranks: the lowest that waits asks first
MOST_STAGGERED = 25
JOIN_SECONDS = 2.0
MOST_SECONDS = (
    0.3  # that one look counts for, or three periods: this process may have been stopped meanwhile
)
FORWARD_SECONDS = (
    1.0  # for the launcher to hand the report on: it may lose what comes just before an abort
)
HASTE_SECONDS = 0.02  # between two looks while somebody asks: a long answer needs several


class Watchdog:
    """Watches over one rank, that of `context`, and over the others while this one waits."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.limit = (
            settings.watchdog()
        )  # seconds without progress of any rank; None if nothing is watched
        self.folder: Path | None = None  # where a report goes; None for the working folder
        self.quiet = 0.0  # seconds without progress of this rank, as far as this watchdog was awake
        self._channels: list[WatchChannel] = []
        self._token: object = None
        self._now = time.monotonic()
        self._lock = threading.Lock()
        self._probe: HangProbe | None = None
        self._probes = 0
        self._held = self._again = (
            0.0  # seconds for which another rank asks; of quiet at which to ask again
        )
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._loudness = logging.WARNING

    @property
    def period(self) -> float:
        """Seconds between two looks."""
        asked = self._probe is not None or self._held > 0
        return HASTE_SECONDS if asked else min(1.0, (self.limit or 10.0) / 10)

    @property
    def window(self) -> float:
        """Seconds that a rank has for its answer."""
        return min(10.0, max(1.0, (self.limit or 0.0) / 3))

    # -- life --------------------------------------------------------------------------------------

    def covers(self, members: tuple[int, ...]) -> bool:
        """Return whether there is a channel with all of these ranks, or none can be made, for ranks
        of another job.
        """
        return -1 in members or any(
            set(members) <= set(channel.members) for channel in self._channels
        )

    def ended_neighbours(self) -> set[int]:
        """Return the world ranks on this host whose process has ended."""
        return {
            member
            for channel in self._channels
            for member, place in zip(channel.members, channel.places)
            if place.host == channel.places[channel.rank].host and state_of(place.pid) == GONE
        }

    def add(self, channel: WatchChannel) -> None:
        with self._lock:
            self._channels.append(channel)
        self._start()

    def configure(self, limit: float | None, folder: Path | None) -> None:
        """Set the limit in seconds, None for no watchdog, and the folder of a report."""
        with self._lock:
            self.limit = limit
            self.folder = folder
            self.quiet = 0.0
            self._again = 0.0
        self._start()

    def _start(self) -> None:
        if self.limit is None or self._thread is not None or not self._channels:
            return
        if self._stop.is_set() or not threads_allowed():
            return
        self._thread = threading.Thread(target=self._watch, name="mpipipe watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(self.period):
            self._tick()

    def look(self) -> None:
        """In a long wait: do what the thread does where there is none."""
        if self._thread is None and time.monotonic() - self._now >= self.period:
            self._tick()

    # -- looking -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.limit is None or not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            elapsed = min(now - self._now, max(MOST_SECONDS, 3 * self.period))
            self._now = now
            self._look(elapsed, self.limit)
        except Exception as error:  # of MPI where a peer has died, for example: others report that
            self._say(error)
        finally:
            self._lock.release()

    def _say(self, error: Exception) -> None:
        logger.log(self._loudness, "the watchdog goes on after %s: %s", type(error).__name__, error)
        self._loudness = logging.DEBUG

    def _look(self, elapsed: float, limit: float) -> None:
        token = self.context.progress_token()
        if token != self._token:
            self._token = token
            self.quiet = 0.0
            self._again = 0.0
        else:
            self.quiet += elapsed
        self._held = max(0.0, self._held - elapsed)
        for channel in self._channels:
            try:
                messages = channel.read()
            except (
                Exception
            ) as error:  # of a network that is gone: a rank that does not answer is silent
                self._say(error)
                continue
            for message in messages:
                self._take(channel, message, limit)
        if self._probe is not None:
            self._probe.waited += elapsed
            self._go_on(self._probe, limit)
        elif self._held == 0:
            self._ask(limit)

    def _take(self, channel: WatchChannel, message: WatchMessage, limit: float) -> None:
        source, name, content = message
        if isinstance(content, Dump):
            if self._probe is not None and self._probe.name == name:
                self._probe.dumps[source] = content
            return
        if source < channel.rank or self._probe is None:
            self._probe = None
            self._held = max(2 * self.window + 2.0, limit / 2)
        channel.send(source, name, self._dump(channel.members[channel.rank], channel, content))

    def _dump(
        self, rank: int, channel: WatchChannel | None = None, neighbours: Collection[int] = ()
    ) -> Dump:
        """Describe this rank of COMM_WORLD, and ranks of the channel on its host that do not
        answer.
        """
        watcher = None if self._thread is None else self._thread.ident
        seen = {}
        if channel is not None:
            for neighbour in neighbours:
                place = channel.places[neighbour]
                seen[channel.members[neighbour]] = look_at(place.pid, place.descriptor)
        return make_dump(self.context, rank, self.quiet, seen, watcher)

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, limit: float) -> None:
        """Ask all ranks of the largest channel that has those which this rank waits for.

        Before their first group there is none. Then nothing is known but who has not come.
        """
        waits = tuple(self.context.long_waits)
        if not waits:
            return
        wait = waits[0]
        wanted = set(wait.absent if wait.group is None else wait.group.members)
        channels = [channel for channel in self._channels if wanted <= set(channel.members)]
        channel = max(channels, key=lambda channel: len(channel.members), default=None)
        rank = runtime.world().rank if channel is None else channel.rank
        if self.quiet < max(limit + STAGGER * min(rank, MOST_STAGGERED), self._again) or not wanted:
            return
        if channel is None:
            missing = sorted(wanted - {rank} - self.context.left.keys())
            self._report(
                [self._dump(rank)],
                [Unresponsive(member, UNKNOWN, self.quiet) for member in missing],
            )
            return
        self._probes += 1
        self._probe = HangProbe(channel, self._probes)
        for peer in self._probe.others:
            channel.send(peer, self._probe.name, ())

    def _go_on(self, probe: HangProbe, limit: float) -> None:
        if self.quiet < limit:  # this rank goes on
            self._probe = None
            return
        channel = probe.channel
        silent = [rank for rank in probe.others if rank not in probe.dumps]
        if silent and probe.waited < self.window:
            return
        least = min((dump.quiet for dump in probe.dumps.values()), default=inf)
        if least < limit:  # a rank has made progress: no hang
            self._probe = None
            self._again = self.quiet + limit - least
            return
        host = channel.places[channel.rank].host
        if not probe.looked:
            probe.looked = True
            watchers = {
                channel.places[rank].host: rank for rank in sorted(probe.dumps, reverse=True)
            }
            watchers.pop(host, None)
            for place, watcher in watchers.items():
                neighbours = [rank for rank in silent if channel.places[rank].host == place]
                if neighbours:
                    del probe.dumps[watcher]
                    probe.waited = 0.0
                    channel.send(watcher, probe.name, neighbours)
            return
        neighbours = [rank for rank in silent if channel.places[rank].host == host]
        mine = self._dump(channel.members[channel.rank], channel, neighbours)
        self._report(
            [mine, *probe.dumps.values()],
            [
                Unresponsive(channel.members[rank], channel.places[rank], self.quiet)
                for rank in silent
                if channel.members[rank] not in self.context.left
            ],
        )

    def _report(self, dumps: list[Dump], silent: list[Unresponsive]) -> None:
        """End the job with what the dumps say; the first one is of this rank."""
        by_rank = {dump.rank: dump for dump in dumps}
        world = runtime.world()
        try:
            verdict = judge(dict(sorted(by_rank.items())), silent)
            publish(verdict, by_rank, self.quiet, self.folder, (dumps[0].rank, world.size))
        finally:
            time.sleep(FORWARD_SECONDS)
            abort_job(world, HUNG)


class HangProbe:
    """What one watchdog asks ranks of a channel, and what they have answered so far."""

    def __init__(self, channel: WatchChannel, number: int) -> None:
        self.channel = channel
        self.name = (
            channel.members[channel.rank],
            number,
        )  # world rank that asks, and the count of its questions
        self.others = [rank for rank in range(len(channel.members)) if rank != channel.rank]
        self.waited = 0.0  # seconds since the last question
        self.dumps: dict[int, Dump] = {}  # by rank
        self.looked = False  # whether other ranks were asked for the silent ones of their host


# -- Which ranks watch over each other: every new group is in some channel, and every rank has one watchdog --


def watch(comm: Communicator) -> None:
    """Give this rank its watchdog, if it has none: also for the wait for other ranks of its first
    group.
    """
    context = current_rank()
    with context.lock:
        if context.watchdog is None:
            context.watchdog = (
                ThreadWatchdog(comm.world, context)
                if runtime.in_process(comm)
                else Watchdog(context)
            )


def enrol(context: RankContext, comm: Communicator, members: tuple[int, ...]) -> tuple[int, ...]:
    """Name a new group on all its ranks alike, and make sure that one channel has all of them;
    collective.
    """
    context.groups_named += 1
    covered = runtime.in_process(comm) or comm.size == 1 or context.watchdog.covers(members)
    mine = np.array([covered, members[comm.rank], context.groups_named], np.int64)
    if comm.size == 1:
        return tuple(mine[1:].tolist())
    table = np.empty((comm.size, mine.size), np.int64)
    wait_for_ranks(
        own(comm.Iallgather(mine, table)),
        "all ranks of a new group",
        members,
        grace=ARRIVAL_SECONDS,
    )
    if not table[:, 0].all():
        context.watchdog.add(open_channel(comm, members))  # type: ignore[arg-type]  # ranks of MPI
    return tuple(table[0, 1:].tolist())


@contextmanager
def watching(seconds: float | None, folder: Path) -> Iterator[None]:
    """Set the limit of this rank, within, to `seconds`, and the folder of a report, if that exists
    by then.

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


class ThreadWatchdog:
    """The watchdog of ranks that are threads, of one `inprocess.run`: it looks at all of them, in
    their own memory.

    It has no thread: it watches while one rank waits, and ranks that all compute are not watched.
    """

    def __init__(self, world: World, context: RankContext) -> None:
        self.world = world
        self.context = context
        self.limit = settings.watchdog()
        self.folder: Path | None = None
        self._token: object = None
        self._since = self._now = time.monotonic()

    def configure(self, limit: float | None, folder: Path | None) -> None:
        """Set the limit in seconds, None for no watchdog; reports of ranks that are threads need no
        folder.
        """
        self.limit = limit
        self.folder = folder

    def look(self) -> None:
        """In a long wait: raise HangError if no rank has made progress for too long."""
        now = time.monotonic()
        if self.limit is None or now - self._now < self.limit / 20:
            return
        contexts = dict(self.world.contexts)
        token = {rank: context.progress_token() for rank, context in contexts.items()}
        if (
            token != self._token or now - self._now > self.limit / 2
        ):  # the second: this wait is not the one before
            self._token = token
            self._since = now
        self._now = now
        rank = next(rank for rank, context in contexts.items() if context is self.context)
        if now - self._since > self.limit * (1 + STAGGER * rank) and not self.world.broken:
            quiet = now - self._since
            dumps = {other: make_dump(context, other, quiet) for other, context in contexts.items()}
            raise HangError(
                f"no rank has made progress for {quiet:.1f} s",
                found="\n    ".join(judge(dumps).lines()),
                remedy=REMEDY,
            )
