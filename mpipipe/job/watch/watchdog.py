"""Finds a hang: one watchdog on each rank, with a thread that speaks MPI, so that a rank that computes answers too.

    quiet for the limit, and this rank waits           ASK  ->  all ranks of its channel
    each answers how long it has been quiet            <- QUIET
    one has seen progress: no hang, ask again later    MOVES -> all, so that none asks before
    none has, or they are silent                       ORDER -> all, with the names of the silent ones
    each describes itself                              <- DUMP
    still no progress: compare, report, MPI_Abort

Progress is what changes `RankContext.progress_token`: a call, an action or a wait that begins or ends, a poll between
two layers. Time counts only while this watchdog is awake, so a job that was stopped as a whole and goes on has not been
quiet. Nothing is sent while ranks wait for less than the limit.

Where MPI takes calls from one thread only, long waits do this in place of the thread. A rank that computes is silent
then, and the report says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.errors import HangError
from mpipipe.job import runtime, settings
from mpipipe.job.communicators import ARRIVAL_SECONDS, wait_for_ranks
from mpipipe.job.context import RankContext, current_rank
from mpipipe.job.inprocess import World
from mpipipe.job.report import abort_job
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, MpiCommunicator
from mpipipe.job.watch.channel import (
    GONE,
    Dump,
    WatchChannel,
    WatchKind,
    WatchMessage,
    look_at,
    make_dump,
    open_channel,
    state_of,
    threads_allowed,
    world_channel,
)
from mpipipe.job.watch.verdict import HUNG, REMEDY, Unresponsive, judge, publish

logger = logging.getLogger("mpipipe")
STAGGER = 0.2  # seconds between ranks: the lowest that waits asks first
MOST_STAGGERED = 25
JOIN_SECONDS = 2.0
MOST_SECONDS = 0.3  # that one look counts for, or three periods: this process may have been stopped meanwhile
FORWARD_SECONDS = 1.0  # for the launcher to hand the report on: it may lose what comes just before an abort
HASTE_SECONDS = 0.02  # between two looks while somebody asks: a long answer needs several


class Watchdog:
    """Watches over one rank, that of `context`, and over the others while this one waits.

    Channel `world` is of all ranks of the job, for those that are in no other channel together.
    """

    def __init__(self, context: RankContext, world: WatchChannel | None = None) -> None:
        self.context, self._world = context, world
        self.limit = settings.watchdog()  # seconds without progress of any rank; None if nothing is watched
        self.folder: Path | None = None  # where a report goes; None for the working folder
        self.quiet = 0.0  # seconds without progress of this rank, as far as this watchdog was awake
        self._channels: list[WatchChannel] = []
        self._token: object = None
        self._now = time.monotonic()
        self._lock = threading.Lock()
        self._probe: HangProbe | None = None
        self._probes = 0
        self._held = self._again = 0.0  # seconds for which another rank asks; of quiet at which to ask again
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._loudness = logging.WARNING
        self._start()

    @property
    def channels(self) -> list[WatchChannel]:
        """Where this watchdog can be asked."""
        return [*self._channels, *filter(None, [self._world])]

    @property
    def period(self) -> float:
        """Seconds between two looks."""
        asked = self._probe is not None or self._held > 0
        return HASTE_SECONDS if asked else min(1.0, (self.limit or 10.0) / 10)

    @property
    def window(self) -> float:
        """Seconds that a rank has for its answer."""
        return min(10.0, max(1.0, (self.limit or 0.0) / 3))

    # -- life ---------------------------------------------------------------------------------------------------

    def covers(self, members: tuple[int, ...]) -> bool:
        """Return whether there is a channel with all of these ranks, or none can be made, for ranks of another job."""
        return -1 in members or any(set(members) <= set(channel.members) for channel in self._channels)

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
            if self._world is not None and channel.size == self._world.size:
                self._leave_world()
        self._start()

    def configure(self, limit: float | None, folder: Path | None) -> None:
        """Set the limit in seconds, None for no watchdog, and the folder of a report."""
        with self._lock:
            self.limit, self.folder, self.quiet, self._again = limit, folder, 0.0, 0.0
        self._start()

    def _start(self) -> None:
        if self.limit is None or self._thread is not None or not self.channels:
            return
        if self._stop.is_set() or not threads_allowed():
            return
        self._thread = threading.Thread(target=self._watch, name="mpipipe watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        if not self._lock.locked():  # else its thread is in MPI still
            self._leave_world()

    def _leave_world(self) -> None:
        if self._world is not None:
            self._world.close()
        self._world = None

    def _watch(self) -> None:
        while not self._stop.wait(self.period):
            self._tick()

    def look(self) -> None:
        """In a long wait: do what the thread does where there is none."""
        if self._thread is None and self.channels and time.monotonic() - self._now >= self.period:
            self._tick()

    # -- looking ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.limit is None or not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            elapsed, self._now = min(now - self._now, max(MOST_SECONDS, 3 * self.period)), now
            self._look(elapsed)
        except Exception as error:  # of MPI where a peer has died, for example: others report that
            self._say(error)
        finally:
            self._lock.release()

    def _say(self, error: Exception) -> None:
        logger.log(self._loudness, "the watchdog goes on after %s: %s", type(error).__name__, error)
        self._loudness = logging.DEBUG

    def _look(self, elapsed: float) -> None:
        token = self.context.progress_token()
        if token != self._token:
            self._token, self.quiet, self._again = token, 0.0, 0.0
        else:
            self.quiet += elapsed
        self._held = max(0.0, self._held - elapsed)
        for channel in self.channels:
            try:
                messages = channel.read()
            except Exception as error:  # of a network that is gone: a rank that does not answer is silent
                self._say(error)
                continue
            for message in messages:
                self._take(channel, message)
        if self._probe is not None:
            self._probe.waited += elapsed
            self._go_on(self._probe)
        elif self.context.long_waits and self._held == 0:
            self._ask()

    def _take(self, channel: WatchChannel, message: WatchMessage) -> None:
        source, kind, name, content = message
        probe = self._probe
        if kind in (WatchKind.ASK, WatchKind.ORDER):
            if source < channel.rank or probe is None:
                self._probe, self._held = None, 2 * self.window + 2.0
            if kind == WatchKind.ASK:
                channel.send([source], WatchKind.QUIET, name, self.quiet)
            else:
                channel.send([source], WatchKind.DUMP, name, self._dump(channel, content))
        elif kind == WatchKind.MOVES:
            self._held, self._again = 0.0, self.quiet + content
        elif probe is not None and probe.name == name:
            if kind == WatchKind.QUIET:
                probe.quiet[source] = content
            else:
                probe.dumps[source] = content

    def _dump(self, channel: WatchChannel, neighbours: list[Unresponsive]) -> Dump:
        watcher = None if self._thread is None else self._thread.ident
        seen = {each.rank: look_at(each.place.pid, each.place.descriptor) for each in neighbours}
        return make_dump(self.context, channel.members[channel.rank], self.quiet, seen, watcher)

    # -- asking -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask ranks of the largest channel with those that this rank waits for: all of them, but for COMM_WORLD.

        Of that only those are asked that this rank waits for: others may never call this package.
        """
        assert self.limit is not None  # by _tick
        waits = tuple(self.context.long_waits)
        group = waits[0].group if waits else None
        wanted = set(group.members) if group is not None else waits[0].absent if waits else set()
        channel = max(self._channels, key=lambda each: (wanted <= set(each.members), each.size), default=None)
        if channel is None or not wanted <= set(channel.members):
            channel = self._world or channel
        if channel is None:
            return
        if channel is not self._world:
            wanted = set(channel.members)
        patience = self.limit + STAGGER * min(channel.rank, MOST_STAGGERED)
        if self.quiet >= max(patience, self._again) and wanted:
            self._probes += 1
            self._probe = HangProbe(channel, self._probes, wanted)
            channel.send(self._probe.others, WatchKind.ASK, self._probe.name)

    def _go_on(self, probe: HangProbe) -> None:
        assert self.limit is not None  # by _tick
        if self.quiet < self.limit:  # this rank goes on
            self._probe = None
            return
        answers: Mapping[int, Any] = probe.dumps if probe.ordered else probe.quiet
        if len(answers) < len(probe.others) and probe.waited < self.window:
            return
        least = min(each.quiet if probe.ordered else each for each in answers.values()) if answers else inf
        if least < self.limit:  # a rank has made progress: no hang, and the others learn when to ask again
            self._probe, self._again = None, self.quiet + self.limit - least
            probe.channel.send(probe.others, WatchKind.MOVES, probe.name, self.limit - least)
        elif probe.ordered:
            self._conclude(probe)
        else:
            self._order(probe)

    def _order(self, probe: HangProbe) -> None:
        """Ask for dumps. The first rank of a host that has answered is to look at the silent ones there."""
        channel = probe.channel
        probe.ordered, probe.waited = True, 0.0
        hosts: dict[str, int] = {}
        for rank in (channel.rank, *sorted(probe.quiet)):
            hosts.setdefault(channel.places[rank].host, rank)
        orders: dict[int, list[Unresponsive]] = {rank: [] for rank in (channel.rank, *probe.others)}
        for each in self._unresponsive(probe, probe.quiet):
            if each.place.host and each.place.host in hosts:
                orders[hosts[each.place.host]].append(each)
        probe.mine = orders.pop(channel.rank)
        for rank, neighbours in orders.items():
            channel.send([rank], WatchKind.ORDER, probe.name, neighbours)

    def _unresponsive(self, probe: HangProbe, answered: Collection[int]) -> list[Unresponsive]:
        channel = probe.channel
        return [
            Unresponsive(channel.members[rank], channel.places[rank], self.quiet)
            for rank in probe.others
            if rank not in answered and channel.members[rank] not in self.context.left
        ]

    def _conclude(self, probe: HangProbe) -> None:
        unresponsive, mine = self._unresponsive(probe, probe.dumps), self._dump(probe.channel, probe.mine)
        dumps, world = {dump.rank: dump for dump in (mine, *probe.dumps.values())}, runtime.world()
        try:
            verdict = judge(dict(sorted(dumps.items())), unresponsive)
            publish(verdict, dumps, self.quiet, self.folder, (mine.rank, world.size))
        finally:
            time.sleep(FORWARD_SECONDS)
            abort_job(world, HUNG)


class HangProbe:
    """What one watchdog asks ranks of a channel, and what they have answered so far."""

    def __init__(self, channel: WatchChannel, number: int, wanted: Collection[int]) -> None:
        self.channel = channel
        self.name = channel.members[channel.rank], number  # world rank that asks, and the count of its questions
        self.others = [rank for rank, member in enumerate(channel.members) if rank != channel.rank and member in wanted]
        self.waited = 0.0  # seconds since the last question
        self.quiet: dict[int, float] = {}  # rank -> seconds without progress
        self.dumps: dict[int, Dump] = {}  # by rank
        self.ordered = False  # whether dumps were asked for
        self.mine: list[Unresponsive] = []  # ranks without an answer that this rank is to look at


# -- Which ranks watch over each other: every new group is in some channel, and every rank has one watchdog ------------


def watch_world(world: MpiCommunicator) -> None:
    """Watch this rank from now on, also while it waits for the other ranks of its first group; not collective."""
    context = current_rank()
    with context.lock:
        if context.watchdog is None and not context.alone:
            context.watchdog = Watchdog(context, world_channel(world))


def enrol(context: RankContext, comm: Communicator, members: tuple[int, ...]) -> tuple[int, ...]:
    """Name a new group on all its ranks alike, and make sure that one channel has all of them; collective."""
    context.groups_named += 1
    threads = runtime.in_process(comm)
    if context.watchdog is None:
        context.watchdog = ThreadWatchdog(comm.world, context) if runtime.in_process(comm) else Watchdog(context)
    covered = threads or comm.size == 1 or context.watchdog.covers(members)
    mine = np.array([covered, members[comm.rank], context.groups_named], np.int64)
    if comm.size == 1:
        return tuple(mine[1:].tolist())
    table = np.empty((comm.size, mine.size), np.int64)
    wait_for_ranks(own(comm.Iallgather(mine, table)), "all ranks of a new group", members, grace=ARRIVAL_SECONDS)
    if not table[:, 0].all():
        context.watchdog.add(open_channel(comm, members))  # type: ignore[arg-type]  # ranks of MPI
    return tuple(table[0, 1:].tolist())


@contextmanager
def watching(seconds: float | None, folder: Path) -> Iterator[None]:
    """Set the limit of this rank, within, to `seconds`, and the folder of a report, if that exists by then.

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


class ThreadWatchdog:
    """The watchdog of ranks that are threads, of one `inprocess.run`: it looks at all of them, in their own memory.

    It has no thread: it watches while one rank waits, and ranks that all compute are not watched.
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

    def look(self) -> None:
        """In a long wait: raise HangError if no rank has made progress for too long."""
        now = time.monotonic()
        if self.limit is None or now - self._now < self.limit / 20:
            return
        contexts = dict(self.world.contexts)
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
