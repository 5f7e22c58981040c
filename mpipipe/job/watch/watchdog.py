"""Finds a hang: one watchdog on each rank, with a thread that speaks MPI while a rank computes.

    this rank waits, and has been quiet for long       ask  ->  all ranks of the channel
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
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, cast

from mpipipe.job import communicators, runtime, settings
from mpipipe.job.consensus import spread
from mpipipe.job.context import RankContext, current_rank
from mpipipe.job.report import abort_job, heading, turn, write
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, MpiCommunicator, MpiRequest, Ranks
from mpipipe.job.wait import LongWait
from mpipipe.job.watch import verdict
from mpipipe.job.watch.dump import GONE, UNKNOWN, Dump, Dumps, RankPlace, make_dump

if TYPE_CHECKING:
    from mpipipe.job.group import RankGroup

logger = logging.getLogger("mpipipe")
JOIN_SECONDS = 2.0
# The place where a rank runs, pickled, takes no more.
PLACE_BYTES = 512
# That one look counts for, or three periods: this process may have been stopped meanwhile.
MOST_SECONDS = 0.3
# Between two looks while somebody asks: a long answer needs several.
HASTE_SECONDS = 0.02


@dataclass
class WatchChannel:
    """A communicator of watchdogs, without other messages."""

    comm: MpiCommunicator
    # world rank -> where it runs, in the order of the ranks of `comm`
    places: dict[int, RankPlace]
    receiving: MpiRequest | None = None


@dataclass
class Question:
    """A question of one watchdog to all the others of a channel."""

    wait: LongWait
    channel: WatchChannel
    asked: float  # time.monotonic() then
    quiet: float  # seconds without progress until then
    answers: dict[int, Dump] = field(default_factory=dict)  # world rank -> what it says


class Watchdog:
    """Watches over one rank, that of `context`, and over the others while this one waits.

    Every group of several ranks is in some channel: groups may overlap, as rows and columns do.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.channels: list[WatchChannel] = []
        # What all ranks say, since the last progress of this one.
        self.dumps: Dumps = {}
        self.quiet = 0.0  # seconds without progress of this rank, while this watchdog was awake
        self._sending: list[MpiRequest] = []
        self._token: object = None
        self._now = time.monotonic()
        self._lock = threading.Lock()
        self._question: Question | None = None
        self._again = 0.0  # seconds of quiet at which to ask again
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._loudness = logging.WARNING

    @property
    def period(self) -> float:
        """Seconds between two looks."""
        if self._question is not None or self._sending:
            return HASTE_SECONDS
        return min(verdict.TELL_SECONDS, self.context.watch_limit, settings.TIMEOUT.limit) / 10

    @property
    def window(self) -> float:
        """Seconds that a rank has for its answer."""
        return min(10.0, max(1.0, self.context.watch_limit / 3))

    # -- life --------------------------------------------------------------------------------------

    def covers(self, members: Ranks) -> bool:
        """Return whether one channel has all these ranks, or none can: ranks of another job."""
        return len(members) < 2 or -1 in members or self._channel_of(members) is not None

    def _channel_of(self, members: Sequence[int]) -> WatchChannel | None:
        """Return the largest channel that has all these ranks."""
        having = [x for x in self.channels if x.places.keys() >= set(members)]
        return max(having, key=lambda channel: len(channel.places), default=None)

    @property
    def neighbour_has_ended(self) -> bool:
        """Whether the process of some rank on this host has ended."""
        for channel in tuple(self.channels):
            if any(place.state == GONE for place in channel.places.values()):
                return True
        return False

    def blame(self) -> str:
        """Say what others do that keeps this rank waiting, after "; "; "" if that is not known."""
        culprits = verdict.judge(self.dumps)
        if not culprits:
            return ""
        text = f"; {culprits[0]}"
        if len(culprits) > 1:
            text += f", and {len(culprits) - 1} ranks more"
        return text

    def open_channel(self, group: RankGroup) -> None:
        """Watch over the ranks of a group; collective."""
        private = cast("MpiCommunicator", communicators.duplicate(group.comm))
        threaded = runtime.threads_allowed()
        place = RankPlace(socket.gethostname(), os.getpid(), threaded)
        sizes = [PLACE_BYTES] * group.size
        places = spread(group, pickle.dumps(place), sizes, "the hosts of all ranks")
        with self._lock:
            self.channels.append(WatchChannel(private, dict(zip(group.members, places))))
        self.start()

    def start(self) -> None:
        """Start the thread, where there is something to watch and MPI allows it."""
        if self.context.watch_limit == inf or self._thread is not None or not self.channels:
            return
        if self._stop.is_set() or not runtime.threads_allowed():
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
        token = (self.context.progress_token(), self.context.watch_limit)
        self.quiet += elapsed
        if token != self._token:
            self._token = token
            self.quiet = 0.0
            self._again = 0.0
            self.dumps = {}
            self._question = None
        self._sending = [request for request in self._sending if not request.Test()]
        for channel in self.channels:
            try:
                for member, asked, dump in self._read(channel):
                    self._take(channel, member, asked, dump)
            except Exception as error:  # the network is gone: a rank is silent then
                self._log(error)
        waits = tuple(self.context.long_waits)
        if self._question is not None:
            self._go_on(self._question)
        elif waits and waits[0].members:
            self._ask(waits[0])

    def _read(self, channel: WatchChannel) -> Iterator[tuple[int, float, Dump | None]]:
        """Give (world rank, time of the question, its answer or None) of all that has arrived."""
        comm = channel.comm
        status = runtime.mpi().Status()
        while channel.receiving is not None or comm.Iprobe(status=status):
            if channel.receiving is None:
                buffer = bytearray(status.Get_count())
                channel.receiving = own(comm.irecv(buffer, status.Get_source()))
            content = channel.receiving.test()[1]
            if content is None:
                break
            channel.receiving = None
            yield content

    def _send(self, channel: WatchChannel, member: int, asked: float, dump: Dump | None) -> None:
        """Ask a rank where it is, or answer what it `asked` at that time; never waits."""
        peer = list(channel.places).index(member)
        self._sending.append(own(channel.comm.isend((runtime.world().rank, asked, dump), peer)))

    def _take(self, channel: WatchChannel, member: int, asked: float, dump: Dump | None) -> None:
        """Take a dump as an answer, or answer a question, whose time comes back."""
        question = self._question
        if dump is None:
            if question is None or member < runtime.world().rank:
                self._question = None
                # The other one asks in place of this one, and asks again.
                patience = self.window + 2.0 + min(self.quiet, self.context.watch_limit / 2)
                self._again = max(self._again, self.quiet + patience)
            self._send(channel, member, asked, self._dump())
        elif question is not None and asked == question.asked:
            question.answers[member] = dump

    def _dump(self) -> Dump:
        return make_dump(self.context, runtime.world().rank, self.quiet)

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, wait: LongWait) -> None:
        """Ask all ranks where they are, if this one has waited for long.

        Before their first common call nothing is known but who has not come.
        """
        channel = self._channel_of(wait.members)
        patience = self.context.watch_limit
        if channel is not None:
            patience = min(patience, settings.TIMEOUT.limit / 3)
            if wait.meeting is not None:
                patience = min(patience, verdict.TELL_SECONDS)
        rank = runtime.world().rank
        patience += turn(rank)
        if self.quiet < max(patience, self._again):
            return
        if channel is None:
            self._report({rank: self._dump()}, dict.fromkeys(sorted(wait.members), UNKNOWN))
            return
        self._question = Question(wait, channel, self._now, self.quiet)
        for member in channel.places:
            if member != rank:
                self._send(channel, member, self._now, None)

    def _go_on(self, question: Question) -> None:
        dump = self._dump()
        dumps = {dump.rank: dump, **question.answers}
        silent = {
            rank: place for rank, place in question.channel.places.items() if rank not in dumps
        }
        if silent and self.quiet - question.quiet < self.window:
            return
        least = min(dump.quiet for dump in dumps.values())
        if least >= self.context.watch_limit:
            self._report(dumps, silent)
        self.dumps = dumps
        question.wait.error = verdict.mismatch(dumps)
        self._question = None
        self._again = self.quiet + min(self.quiet, self.context.watch_limit - least)

    def _report(self, dumps: dict[int, Dump], silent: dict[int, RankPlace]) -> None:
        """End the job with what the dumps say; a rank that has left is not silent."""
        world = runtime.world()
        for rank in (*dumps, *self.context.left):
            silent.pop(rank, None)
        try:
            quiet = dumps[world.rank].quiet
            lines = [
                heading(world.rank, world.size),
                f"no rank has made progress for {quiet:.1f} s",
                *verdict.report_lines(dumps, silent, quiet),
                f"remedy: {verdict.REMEDY}",
            ]
            write("\n  ".join(lines) + "\n")
        finally:
            abort_job(world, verdict.HUNG)


def watch_over(comm: Communicator) -> Watchdog | None:
    """Return the watchdog of this rank, also for the wait for other ranks of its first group.

    Ranks that are threads have one for all of them: see inprocess.py.
    """
    context = current_rank()
    with context.lock:
        if context.watchdog is None and not runtime.in_process(comm):
            context.watchdog = Watchdog(context)
    return context.watchdog


@contextmanager
def watching(seconds: float | None) -> Iterator[None]:
    """Set the limit of this rank, within, to `seconds`.

    None stands for what MPIPIPE_WATCHDOG says, 0 for no watchdog. Every rank enters with the same.
    """
    context = current_rank()
    before = context.watch_limit
    context.watch_limit = seconds or inf
    if seconds is None:
        context.watch_limit = settings.WATCHDOG.limit
    if context.watchdog is not None:
        context.watchdog.start()
    try:
        yield
    finally:
        context.watch_limit = before
