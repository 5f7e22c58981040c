"""Finds a hang: one watchdog on each rank, with a thread that speaks MPI while a rank computes.

    this rank waits, and has been quiet for long       ask  ->  all ranks of its channel
    each says where it is, and how long it is quiet    <- Dump
    some wait for each other in different calls        MismatchError ends the wait
    one has made progress                              no hang: ask again later
    nobody has made progress for the limit             compare, report, MPI_Abort

Progress is what changes `RankContext.progress_token`: a call, an action or a wait that begins or
ends, a poll between two layers. Time counts only while this watchdog is awake, so a job that was
stopped as a whole and goes on has not been quiet. In a call of all ranks the lowest one that waits
asks after TELL_SECONDS, and then in intervals that double; for a message it asks at the limit.

Where MPI takes calls from one thread only, long waits do this in place of the thread. A rank that
computes is silent then, and the report says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import numpy as np

from mpipipe.job import runtime, settings
from mpipipe.job.communicators import gather_rows
from mpipipe.job.context import RankContext, current_rank
from mpipipe.job.report import abort_job
from mpipipe.job.types import Communicator, GroupName, Ranks, RankWait
from mpipipe.job.watch import verdict
from mpipipe.job.watch.channel import (
    GONE,
    UNKNOWN,
    Dump,
    RankPlace,
    WatchChannel,
    make_dump,
    open_channel,
    stacks_of,
    threads_allowed,
)

logger = logging.getLogger("mpipipe")
STAGGER = 0.2  # seconds between ranks: the lowest that waits asks first
MOST_STAGGERED = 25
JOIN_SECONDS = 2.0
# That one look counts for, or three periods: this process may have been stopped meanwhile.
MOST_SECONDS = 0.3
# For the launcher to hand the report on: it may lose what comes just before an abort.
FORWARD_SECONDS = 1.0
# Between two looks while somebody asks: a long answer needs several.
HASTE_SECONDS = 0.02


class Watchdog:
    """Watches over one rank, that of `context`, and over the others while this one waits."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.limit = settings.watchdog()  # seconds without progress of any rank
        self.folder: Path | None = None  # a report goes there; None: into the working folder
        self.dumps: dict[int, Dump] = {}  # all ranks, since the last progress of this one
        self.quiet = 0.0  # seconds without progress of this rank, while this watchdog was awake
        self._channels: list[WatchChannel] = []
        self._token: object = None
        self._now = time.monotonic()
        self._lock = threading.Lock()
        self._question: Question | None = None
        self._questions = 0
        self._yielding = 0.0  # seconds for which a lower rank asks in place of this one
        self._again = 0.0  # seconds of quiet at which to ask again
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._loudness = logging.WARNING

    @property
    def period(self) -> float:
        """Seconds between two looks."""
        if self._question is not None or any(channel.sending for channel in self._channels):
            return HASTE_SECONDS
        return min(verdict.TELL_SECONDS, self.limit, settings.timeout()) / 10

    @property
    def window(self) -> float:
        """Seconds that a rank has for its answer."""
        return min(10.0, max(1.0, self.limit / 3))

    # -- life --------------------------------------------------------------------------------------

    def covers(self, members: Ranks) -> bool:
        """True if one channel has all these ranks, or none can, for ranks of another job."""
        return -1 in members or self._channel_of(members) is not None

    def _channel_of(self, members: Sequence[int]) -> WatchChannel | None:
        """Return the largest channel that has all these ranks."""
        largest = None
        for channel in self._channels:
            if set(channel.members).issuperset(members):
                if largest is None or len(channel.members) > len(largest.members):
                    largest = channel
        return largest

    def ended_neighbours(self) -> set[int]:
        """Return the world ranks on this host whose process has ended."""
        ended = set()
        for channel in self._channels:
            for member, state in channel.states_on_host().items():
                if state == GONE:
                    ended.add(member)
        return ended

    def add(self, channel: WatchChannel) -> None:
        with self._lock:
            self._channels.append(channel)
        self._start()

    def configure(self, limit: float, folder: Path | None) -> None:
        """Set the limit in seconds, inf for none, and the folder of a report."""
        with self._lock:
            self.limit = limit
            self.folder = folder
            self.quiet = 0.0
            self._again = 0.0
        self._start()

    def _start(self) -> None:
        if self.limit == inf or self._thread is not None or not self._channels:
            return
        if self._stop.is_set() or not threads_allowed():
            return
        self._thread = threading.Thread(target=self._watch, name="mpipipe watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: MPI is about to be finalized."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(self.period):
            self._tick()

    def look(self) -> None:
        """Do in a long wait what the thread does where there is one."""
        if self._thread is None and time.monotonic() - self._now >= self.period:
            self._tick()

    def blame(self) -> str:
        """Say what others do that keeps this rank waiting, after "; "; "" if that is not known."""
        culprits = verdict.judge(self.dumps).culprits
        if not culprits:
            return ""
        text = f"; {culprits[0].text}"
        if len(culprits) > 1:
            text += f", and {len(culprits) - 1} ranks more"
        return text

    # -- looking -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            elapsed = min(now - self._now, max(MOST_SECONDS, 3 * self.period))
            self._now = now
            self._look(elapsed)
        except Exception as error:  # MPI may raise when a peer has died: others report that
            self._log(error)
        finally:
            self._lock.release()

    def _log(self, error: Exception) -> None:
        logger.log(self._loudness, "the watchdog goes on after %s: %s", type(error).__name__, error)
        self._loudness = logging.DEBUG

    def _look(self, elapsed: float) -> None:
        token = self.context.progress_token()
        self.quiet += elapsed
        if token != self._token:
            self._token = token
            self.quiet = 0.0
            self._again = 0.0
            self._yielding = 0.0
            self.dumps = {}
            self._question = None
        self._yielding = max(0.0, self._yielding - elapsed)
        for channel in self._channels:
            try:
                messages = channel.read()
            except Exception as error:  # the network is gone: a rank is silent then
                self._log(error)
                continue
            for source, number, dump in messages:
                self._take(channel, source, number, dump)
        if self._question is not None:
            self._question.waited += elapsed
            self._go_on(self._question)
            return
        waits = tuple(self.context.long_waits)
        if self._yielding == 0 and waits:
            self._ask(waits[0])

    def _take(self, channel: WatchChannel, source: int, number: int, dump: Dump | None) -> None:
        """Take a dump as an answer, or answer a question, whose number comes back."""
        question = self._question
        if dump is not None:
            if question is not None and number == question.number:
                question.silent.discard(source)
                question.dumps.append(dump)
            return
        if source < channel.rank or question is None:
            self._question = None
            # until the other one asks again
            self._yielding = self.window + 2.0 + min(self.quiet, self.limit / 2)
        channel.send(source, number, self._dump(channel))

    def _dump(self, channel: WatchChannel) -> Dump:
        watcher = None
        if self._thread is not None:
            watcher = self._thread.ident
        states = None
        if self.quiet >= self.limit:
            states = channel.states_on_host()
        rank = channel.members[channel.rank]
        return make_dump(self.context, rank, self.quiet, self.limit, states, watcher)

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, wait: RankWait) -> None:
        """Ask all ranks of the largest channel that has those which this rank waits for.

        Before their first group there is none. Then nothing is known but who has not come.
        """
        channel = self._channel_of(wait.members)
        if channel is None:
            patience = self.limit
            rank = runtime.world().rank
        else:
            patience = min(self.limit, settings.timeout() / 3)
            rank = channel.rank
            if wait.meeting is not None:
                patience = min(patience, verdict.TELL_SECONDS)
        patience = max(patience + STAGGER * min(rank, MOST_STAGGERED), self._again)
        if self.quiet < patience or not wait.members:
            return
        if channel is None:
            missing = set(wait.members) - {rank} - self.context.left.keys()
            dump = make_dump(self.context, rank, self.quiet, self.limit)
            self._report({rank: dump}, dict.fromkeys(sorted(missing), UNKNOWN))
            return
        others = set(range(len(channel.members))) - {channel.rank}
        self._questions += 1
        self._question = Question(channel, self._questions, wait, others)
        for peer in others:
            channel.send(peer, self._questions, None)

    def _go_on(self, question: Question) -> None:
        channel = question.channel
        if question.silent and question.waited < self.window:
            return
        dumps = {dump.rank: dump for dump in (self._dump(channel), *question.dumps)}
        least = min(dump.quiet for dump in dumps.values())
        if least >= self.limit:
            places = {}
            for rank in sorted(question.silent):
                if channel.members[rank] not in self.context.left:
                    places[channel.members[rank]] = channel.places[rank]
            self._report(dumps, places)
        self.dumps = dumps
        question.wait.error = verdict.mismatch(dumps)
        self._question = None
        self._again = self.quiet + min(self.quiet, self.limit - least)

    def _report(self, dumps: dict[int, Dump], silent: dict[int, RankPlace]) -> None:
        """End the job with what the dumps say."""
        world = runtime.world()
        try:
            judgement = verdict.judge(dict(sorted(dumps.items())), silent, self.quiet)
            stacks = {rank: stacks_of(place) for rank, place in silent.items()}
            verdict.publish(judgement, dumps, stacks, self.folder, world.rank, world.size)
        finally:
            time.sleep(FORWARD_SECONDS)
            abort_job(world, verdict.HUNG)


@dataclass
class Question:
    """A question of one watchdog to the ranks of a channel, and the answers so far."""

    channel: WatchChannel
    number: int
    wait: RankWait
    silent: set[int]  # ranks of the channel that have not answered
    waited: float = 0.0  # seconds since then
    dumps: list[Dump] = field(default_factory=list)  # the answers


# -- Which ranks watch over each other: every new group is in some channel -------------------------


def watch(comm: Communicator) -> None:
    """Give this rank its watchdog, also for the wait for other ranks of its first group."""
    context = current_rank()
    with context.lock:
        if context.watchdog is None and not runtime.in_process(comm):
            context.watchdog = Watchdog(context)


def enrol(context: RankContext, comm: Communicator, members: Ranks) -> GroupName:
    """Name a new group on all its ranks alike, and give all of them one channel; collective."""
    context.groups_named += 1
    watchdog = context.watchdog
    covered = comm.size == 1 or not isinstance(watchdog, Watchdog) or watchdog.covers(members)
    row = np.array([covered, members[comm.rank], context.groups_named], np.int64)
    table = gather_rows(comm, row, "all ranks of a new group", members)
    if isinstance(watchdog, Watchdog) and not table[:, 0].all():
        watchdog.add(open_channel(comm, members))  # type: ignore[arg-type]  # ranks of MPI
    return tuple(table[0, 1:].tolist())


@contextmanager
def watching(seconds: float | None, folder: Path) -> Iterator[None]:
    """Set the limit of this rank, within, to `seconds`, and the folder of a report.

    None stands for what MPIPIPE_WATCHDOG says, 0 for no watchdog. Every rank enters with the same.
    """
    context = current_rank()
    watchdog = context.watchdog
    limit = seconds or inf
    if seconds is None:
        limit = settings.watchdog()
    if watchdog is None:  # this rank is a thread, or no group was ever made
        outer = context.watch_limit
        context.watch_limit = limit
        try:
            yield
        finally:
            context.watch_limit = outer
        return
    before = watchdog.limit, watchdog.folder
    watchdog.configure(limit, folder)
    try:
        yield
    finally:
        watchdog.configure(*before)
