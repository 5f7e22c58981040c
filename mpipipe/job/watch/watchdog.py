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
from collections.abc import Collection, Iterable
from pathlib import Path

from mpipipe.job import runtime, settings
from mpipipe.job.context import RankContext
from mpipipe.job.report import abort_job
from mpipipe.job.watch.channel import (
    GONE,
    Channel,
    Dump,
    WatchKind,
    WatchMessage,
    look_at,
    make_dump,
    state_of,
    threads_allowed,
)
from mpipipe.job.watch.verdict import HUNG, Unresponsive, judge, publish

logger = logging.getLogger("mpipipe")
STAGGER = 0.2  # seconds between ranks: the lowest that waits asks first
MOST_STAGGERED = 25
JOIN_SECONDS = 2.0
MOST_SECONDS = 0.3  # that one look counts for, or three periods: this process may have been stopped meanwhile
FORWARD_SECONDS = 1.0  # for the launcher to hand the report on: it may lose what comes just before an abort
HASTE_SECONDS = 0.02  # between two looks while somebody asks: a long answer needs several


class Watchdog:
    """Watches over one rank, `process`, and over the others while this one waits.

    Channel `world` is of all ranks of the job, for those that are in no other channel together.

    Attributes
    ----------
    limit : float or None
        Seconds without progress of any rank; None if nothing is watched.
    folder : Path or None
        Where a report goes; None for the working folder.
    quiet : float
        Seconds without progress of this rank, as far as this watchdog was awake.
    """

    def __init__(self, context: RankContext, world: Channel | None = None) -> None:
        self.context, self._world = context, world
        self.limit = settings.watchdog()
        self.folder: Path | None = None
        self.quiet = 0.0
        self._channels: list[Channel] = []
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
    def channels(self) -> list[Channel]:
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
        """Whether there is a channel with all of these ranks, or none can be made, for ranks of another job."""
        return -1 in members or any(set(members) <= set(channel.members) for channel in self._channels)

    def ended_neighbours(self) -> set[int]:
        """World ranks on this host whose process has ended."""
        found = set()
        for channel in self._channels:
            for member, place in zip(channel.members, channel.places):
                if place.host == channel.places[channel.rank].host and state_of(place.pid) == GONE:
                    found.add(member)
        return found

    def add(self, channel: Channel) -> None:
        """Watch over the ranks of one channel more."""
        with self._lock:
            self._channels.append(channel)
            if self._world is not None and channel.size == self._world.size:
                self._leave_world()
        self._start()

    def forget(self) -> None:
        """Watch over nobody, until there are new channels: a rank of those that there were has died."""
        with self._lock:
            self._leave_world()
            self._channels, self._probe, self._held, self.quiet, self._again = [], None, 0.0, 0.0, 0.0

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
        """End the thread; MPI is about to be finalized."""
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
        if self.context.lifeline is None or not self.context.lifeline.is_broken:  # else the waits meet the same
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
            except Exception as error:  # of a network that is gone: whoever does not answer is silent
                self._say(error)
                continue
            for message in messages:
                self._take(channel, message)
        if self._probe is not None:
            self._probe.waited += elapsed
            self._go_on(self._probe)
        elif self.context.long_waits and self._held == 0:
            self._ask()

    def _take(self, channel: Channel, message: WatchMessage) -> None:
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

    def _dump(self, channel: Channel, neighbours: list[Unresponsive]) -> Dump:
        watcher = 0 if self._thread is None else self._thread.ident or 0
        seen = {each.rank: look_at(each.place.pid, each.place.descriptor) for each in neighbours}
        return make_dump(self.context, channel.members[channel.rank], self.quiet, seen, watcher)

    # -- asking -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        assert self.limit is not None  # by _tick
        channel, wanted = self._channel()
        patience = self.limit + STAGGER * min(0 if channel is None else channel.rank, MOST_STAGGERED)
        if self.quiet < max(patience, self._again) or channel is None or not wanted:
            return
        self._probes += 1
        self._probe = HangProbe(channel, self._probes, wanted)
        channel.send(self._probe.others, WatchKind.ASK, self._probe.name)

    def _channel(self) -> tuple[Channel | None, Collection[int]]:
        """The largest channel with the ranks that this one waits for, and whom to ask there: of COMM_WORLD only them.

        Other ranks of COMM_WORLD may never call this package.
        """
        waits = tuple(self.context.long_waits)
        group = waits[0].group if waits else None
        wanted = set(group.peers.members) if group is not None else waits[0].absent if waits else set()
        best = max(self._channels, key=lambda each: (wanted <= set(each.members), each.size), default=None)
        if best is None or not wanted <= set(best.members):
            best = self._world or best
        return best, wanted if best is self._world or best is None else best.members

    def _go_on(self, probe: HangProbe) -> None:
        assert self.limit is not None  # by _tick
        if self.quiet < self.limit:  # this rank goes on
            self._probe = None
            return
        if probe.unresponsive is None:
            if len(probe.quiet) == len(probe.others) or probe.waited >= self.window:
                if not self._postpone(probe, probe.quiet.values()):
                    self._order(probe)
        elif len(probe.dumps) == len(probe.others) or probe.waited >= self.window:
            if not self._postpone(probe, (dump.quiet for dump in probe.dumps.values())):
                self._conclude(probe)

    def _postpone(self, probe: HangProbe, quiet: Iterable[float]) -> bool:
        """Whether some rank has made progress, so that there is no hang."""
        assert self.limit is not None
        least = min(quiet, default=self.limit)
        if least >= self.limit:
            return False
        self._probe, self._again = None, self.quiet + self.limit - least
        probe.channel.send(probe.others, WatchKind.MOVES, probe.name, self.limit - least)
        return True

    def _order(self, probe: HangProbe) -> None:
        """Ask for dumps. The first rank of a host that has answered is to look at the silent ones there."""
        channel, unresponsive = probe.channel, self._unresponsive(probe, set(probe.quiet))
        probe.unresponsive, probe.waited = unresponsive, 0.0
        hosts: dict[str, int] = {}
        for rank in (channel.rank, *sorted(probe.quiet)):
            hosts.setdefault(channel.places[rank].host, rank)
        orders: dict[int, list[Unresponsive]] = {rank: [] for rank in (channel.rank, *probe.others)}
        for each in unresponsive:
            if each.place.host and each.place.host in hosts:
                orders[hosts[each.place.host]].append(each)
        probe.mine = orders.pop(channel.rank)
        for rank, neighbours in orders.items():
            channel.send([rank], WatchKind.ORDER, probe.name, neighbours)

    def _unresponsive(self, probe: HangProbe, answered: set[int]) -> list[Unresponsive]:
        channel = probe.channel
        return [
            Unresponsive(channel.members[rank], channel.places[rank], self.quiet)
            for rank in probe.others
            if rank not in answered and channel.members[rank] not in self.context.left
        ]

    def _conclude(self, probe: HangProbe) -> None:
        unresponsive, mine = self._unresponsive(probe, set(probe.dumps)), self._dump(probe.channel, probe.mine)
        dumps, world = {dump.rank: dump for dump in (mine, *probe.dumps.values())}, runtime.world()
        try:
            verdict = judge(dict(sorted(dumps.items())), unresponsive)
            publish(verdict, dumps, self.quiet, self.folder, (mine.rank, world.size))
        finally:
            time.sleep(FORWARD_SECONDS)
            abort_job(world, HUNG, self.context)


# -- What one watchdog asks all others, and what they have answered so far --------------------------------------------


class HangProbe:
    """One question to ranks of a channel, and their answers.

    Parameters
    ----------
    channel, number : where it is asked, and its how many-th question of this rank it is
    wanted : world ranks that are asked

    Attributes
    ----------
    name : (world rank that asks, its how many-th)
    others : the ranks that are asked
    waited : seconds since the last question
    quiet : rank -> seconds without progress
    dumps : rank -> Dump, once dumps were asked for
    silent : the ranks that have not answered; None before dumps were asked for
    mine : those of them that this rank is to look at
    """

    def __init__(self, channel: Channel, number: int, wanted: Collection[int]) -> None:
        self.channel, self.name = channel, (channel.members[channel.rank], number)
        self.others = [rank for rank, member in enumerate(channel.members) if rank != channel.rank and member in wanted]
        self.waited = 0.0
        self.quiet: dict[int, float] = {}
        self.dumps: dict[int, Dump] = {}
        self.unresponsive: list[Unresponsive] | None = None
        self.mine: list[Unresponsive] = []
