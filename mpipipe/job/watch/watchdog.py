"""Finds a hang: one watchdog on each rank, with a thread that speaks MPI, so that a rank that computes answers too.

    quiet for the limit, and this rank waits           ASK  ->  all ranks of its channel
    each answers how long it has been quiet            <- QUIET
    one has seen progress: no hang, ask again later    MOVES -> all, so that none asks before
    none has, or they are silent                       ORDER -> all, with the names of the silent ones
    each describes itself                              <- DUMP
    still no progress: compare, report, MPI_Abort

Progress is whatever changes `Process.sign`: a call, an action or a wait that begins or ends, a poll between two layers.
Time counts only while this watchdog is awake, so a job that was stopped as a whole and goes on has not been quiet.
Nothing is sent while ranks wait for less than the limit.

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
from mpipipe.job.context import Process
from mpipipe.job.report import abort_job
from mpipipe.job.watch.channel import GONE, Channel, Dump, Kind, Letter, look_at, make_dump, state_of, threads_allowed
from mpipipe.job.watch.verdict import HUNG, Silent, judge, publish

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

    def __init__(self, process: Process, world: Channel | None = None) -> None:
        self.process, self._world = process, world
        self.limit = settings.watchdog()
        self.folder: Path | None = None
        self.quiet = 0.0
        self._channels: list[Channel] = []
        self._sign: object = None
        self._now = time.monotonic()
        self._lock = threading.Lock()
        self._inquiry: Inquiry | None = None
        self._inquiries = 0
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
        asked = self._inquiry is not None or self._held > 0
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
            self._channels, self._inquiry, self._held, self.quiet, self._again = [], None, 0.0, 0.0, 0.0

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

    def attend(self) -> None:
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
        if self.process.lifeline is None or not self.process.lifeline.is_broken:  # else the waits meet the same
            logger.log(self._loudness, "the watchdog goes on after %s: %s", type(error).__name__, error)
            self._loudness = logging.DEBUG

    def _look(self, elapsed: float) -> None:
        sign = self.process.sign()
        if sign != self._sign:
            self._sign, self.quiet, self._again = sign, 0.0, 0.0
        else:
            self.quiet += elapsed
        self._held = max(0.0, self._held - elapsed)
        for channel in self.channels:
            try:
                letters = channel.read()
            except Exception as error:  # of a network that is gone: whoever does not answer is silent
                self._say(error)
                continue
            for letter in letters:
                self._take(channel, letter)
        if self._inquiry is not None:
            self._inquiry.waited += elapsed
            self._go_on(self._inquiry)
        elif self.process.vigils and self._held == 0:
            self._ask()

    def _take(self, channel: Channel, letter: Letter) -> None:
        source, kind, name, content = letter
        inquiry = self._inquiry
        if kind in (Kind.ASK, Kind.ORDER):
            if source < channel.rank or inquiry is None:
                self._inquiry, self._held = None, 2 * self.window + 2.0
            if kind == Kind.ASK:
                channel.send([source], Kind.QUIET, name, self.quiet)
            else:
                channel.send([source], Kind.DUMP, name, self._dump(channel, content))
        elif kind == Kind.MOVES:
            self._held, self._again = 0.0, self.quiet + content
        elif inquiry is not None and inquiry.name == name:
            if kind == Kind.QUIET:
                inquiry.quiet[source] = content
            else:
                inquiry.dumps[source] = content

    def _dump(self, channel: Channel, neighbours: list[Silent]) -> Dump:
        watcher = 0 if self._thread is None else self._thread.ident or 0
        seen = {each.rank: look_at(each.place.pid, each.place.descriptor) for each in neighbours}
        return make_dump(self.process, channel.members[channel.rank], self.quiet, seen, watcher)

    # -- asking -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        assert self.limit is not None  # by _tick
        channel, wanted = self._channel()
        patience = self.limit + STAGGER * min(0 if channel is None else channel.rank, MOST_STAGGERED)
        if self.quiet < max(patience, self._again) or channel is None or not wanted:
            return
        self._inquiries += 1
        self._inquiry = Inquiry(channel, self._inquiries, wanted)
        channel.send(self._inquiry.others, Kind.ASK, self._inquiry.name)

    def _channel(self) -> tuple[Channel | None, Collection[int]]:
        """The largest channel with the ranks that this one waits for, and whom to ask there: of COMM_WORLD only them.

        Other ranks of COMM_WORLD may never call this package.
        """
        vigils = tuple(self.process.vigils)
        group = vigils[0].group if vigils else None
        wanted = set(group.presence.members) if group is not None else vigils[0].absent if vigils else set()
        best = max(self._channels, key=lambda each: (wanted <= set(each.members), each.size), default=None)
        if best is None or not wanted <= set(best.members):
            best = self._world or best
        return best, wanted if best is self._world or best is None else best.members

    def _go_on(self, inquiry: Inquiry) -> None:
        assert self.limit is not None  # by _tick
        if self.quiet < self.limit:  # this rank goes on
            self._inquiry = None
            return
        if inquiry.silent is None:
            if len(inquiry.quiet) == len(inquiry.others) or inquiry.waited >= self.window:
                if not self._postpone(inquiry, inquiry.quiet.values()):
                    self._order(inquiry)
        elif len(inquiry.dumps) == len(inquiry.others) or inquiry.waited >= self.window:
            if not self._postpone(inquiry, (dump.quiet for dump in inquiry.dumps.values())):
                self._conclude(inquiry)

    def _postpone(self, inquiry: Inquiry, quiet: Iterable[float]) -> bool:
        """Whether some rank has made progress, so that there is no hang."""
        assert self.limit is not None
        least = min(quiet, default=self.limit)
        if least >= self.limit:
            return False
        self._inquiry, self._again = None, self.quiet + self.limit - least
        inquiry.channel.send(inquiry.others, Kind.MOVES, inquiry.name, self.limit - least)
        return True

    def _order(self, inquiry: Inquiry) -> None:
        """Ask for dumps. The first rank of a host that has answered is to look at the silent ones there."""
        channel, silent = inquiry.channel, self._silent(inquiry, set(inquiry.quiet))
        inquiry.silent, inquiry.waited = silent, 0.0
        hosts: dict[str, int] = {}
        for rank in (channel.rank, *sorted(inquiry.quiet)):
            hosts.setdefault(channel.places[rank].host, rank)
        orders: dict[int, list[Silent]] = {rank: [] for rank in (channel.rank, *inquiry.others)}
        for each in silent:
            if each.place.host and each.place.host in hosts:
                orders[hosts[each.place.host]].append(each)
        inquiry.mine = orders.pop(channel.rank)
        for rank, neighbours in orders.items():
            channel.send([rank], Kind.ORDER, inquiry.name, neighbours)

    def _silent(self, inquiry: Inquiry, answered: set[int]) -> list[Silent]:
        channel = inquiry.channel
        return [
            Silent(channel.members[rank], channel.places[rank], self.quiet)
            for rank in inquiry.others
            if rank not in answered and channel.members[rank] not in self.process.left
        ]

    def _conclude(self, inquiry: Inquiry) -> None:
        silent, mine = self._silent(inquiry, set(inquiry.dumps)), self._dump(inquiry.channel, inquiry.mine)
        dumps, world = {dump.rank: dump for dump in (mine, *inquiry.dumps.values())}, runtime.world()
        try:
            verdict = judge(dict(sorted(dumps.items())), silent)
            publish(verdict, dumps, self.quiet, self.folder, (mine.rank, world.size))
        finally:
            time.sleep(FORWARD_SECONDS)
            abort_job(world, HUNG, self.process)


# -- What one watchdog asks all others, and what they have answered so far --------------------------------------------


class Inquiry:
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
        self.silent: list[Silent] | None = None
        self.mine: list[Silent] = []
