"""Messages between the watchdogs of several ranks, and what a rank says of itself in them."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeAlias

import numpy as np

from mpipipe.job import communicators, runtime
from mpipipe.job.communicators import gather_rows
from mpipipe.job.context import RankContext
from mpipipe.job.flight import Snapshot
from mpipipe.job.requests import own
from mpipipe.job.types import GroupName, Meeting, MpiCommunicator, Ranks, RankWait, Request

PLACE_BYTES = 64


class RankPlace(NamedTuple):
    """Where a rank runs, and how it can be watched from outside."""

    host: str  # "" for a rank that has said nothing of itself
    pid: int
    threaded: bool  # whether its watchdog answers while it computes
    descriptor: int  # its stacks, see offer_stacks


UNKNOWN = RankPlace("", 0, True, -1)


class WatchChannel:
    """The watchdogs of the ranks of a communicator, which has no other messages.

    `members` are their ranks in COMM_WORLD.
    """

    def __init__(self, comm: MpiCommunicator, members: Ranks, places: Sequence[RankPlace]) -> None:
        self.comm = comm
        self.members = members
        self.places = places
        self.rank = comm.rank
        self._status = runtime.mpi().Status()
        self.sending: list[Request] = []
        self._receiving: tuple[Request, np.ndarray, int] | None = None

    def states_on_host(self) -> dict[int, str]:
        """Return the state of the process of each world rank on the host of this one."""
        states = {}
        for member, place in zip(self.members, self.places):
            if place.host == self.places[self.rank].host:
                states[member] = state_of(place.pid)
        return states

    def send(self, peer: int, number: int, dump: Dump | None) -> None:
        """Ask a rank where it is, or answer the question `number`; never waits."""
        data = np.frombuffer(pickle.dumps((number, dump)), np.uint8)
        self.sending.append(own(self.comm.Isend(data, peer)))

    def read(self) -> list[tuple[int, int, Dump | None]]:
        """Return (rank, number of the question, its answer or None) of all that has arrived."""
        arrived = []
        status = self._status
        while self._receiving is not None or self.comm.Iprobe(status=status):
            if self._receiving is None:
                source = status.Get_source()
                buffer = np.empty(status.Get_count(), np.uint8)
                self._receiving = own(self.comm.Irecv(buffer, source)), buffer, source
            request, buffer, source = self._receiving
            if not request.Test():
                break
            self._receiving = None
            arrived.append((source, *pickle.loads(buffer.tobytes())))
        self.sending = [request for request in self.sending if not request.Test()]
        return arrived


def threads_allowed() -> bool:
    """Return whether MPI takes calls from several threads at once."""
    MPI = runtime.mpi()
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def open_channel(comm: MpiCommunicator, members: Ranks) -> WatchChannel:
    """Return the channel of the ranks of `comm`, on a duplicate; collective."""
    private = communicators.duplicate(comm)
    private.Set_name("mpipipe watchdog")
    text = f"{os.getpid()} {threads_allowed():d} {offer_stacks()} {socket.gethostname()}"
    row = np.frombuffer(text.encode().ljust(PLACE_BYTES, b"\0")[:PLACE_BYTES], np.uint8)
    places = []
    for line in gather_rows(private, row, "the hosts of all ranks", members):
        words = line.tobytes().rstrip(b"\0").decode("utf-8", "replace")
        pid, threaded, descriptor, host = words.split(" ", 3)
        places.append(RankPlace(host, int(pid), threaded == "1", int(descriptor)))
    return WatchChannel(private, members, places)


# -- What one rank says of itself ------------------------------------------------------------------


TRIES = 5  # a list may change while another thread reads it
PACKAGE = str(Path(__file__).parents[2])


class Waits(NamedTuple):
    """One wait under way, as other ranks see it."""

    text: str  # the reason
    seconds: float  # how long
    peers: Ranks  # world ranks that must come, each of which may be the reason
    meeting: Meeting | None  # the call to which all of them must come


class Dump(NamedTuple):
    """What one rank says of itself, at one moment."""

    rank: int  # its number in COMM_WORLD
    host: str
    quiet: float  # seconds without progress
    waits: tuple[Waits, ...]
    snapshots: tuple[Snapshot, ...]  # how far it has come in each plan
    ended: bool  # whether its program is over
    where: str  # the line of code that it is in
    stacks: str  # all its threads; "" if it has not been quiet for long
    states: Mapping[int, str]  # world rank -> state of a process on this host
    # The number of the last call that it has begun, of all that it may come to by itself: none
    # where a thread waits and another goes on.
    reached: Mapping[GroupName, int] | None = None


Dumps: TypeAlias = Mapping[int, Dump]  # world rank -> what it says


def make_dump(
    context: RankContext,
    rank: int,
    quiet: float,
    limit: float,
    states: Mapping[int, str] | None = None,
    watcher: int | None = None,
) -> Dump:
    """Describe a rank that has been quiet so long; with its stacks, if for `limit` seconds."""
    snapshots = _snapshots(context)
    frames = sys._current_frames()
    names = {}
    for thread in threading.enumerate():
        names[thread.ident] = thread.name
    rank_thread = context.thread
    for snapshot in snapshots:
        if snapshot.doing:
            rank_thread = snapshot.thread
            break
    stacks = []
    if quiet >= limit:
        for number, frame in frames.items():
            if number != watcher:
                name = names.get(number, number)
                lines = "".join(traceback.format_stack(frame))
                stacks.append(f"thread {name}, most recent call last:\n{lines}")
    reached = None
    if context.single_threaded(context.thread):
        groups = tuple(context.groups)
        reached = {group.key: group.calls for group in groups}
        reached |= context.passed | context.makings
    return Dump(
        rank=rank,
        host=socket.gethostname(),
        quiet=quiet,
        waits=tuple(map(_waits_of, tuple(context.long_waits))),
        snapshots=snapshots,
        ended=context.ended,
        where=_where(frames.get(rank_thread or 0)),
        stacks="\n".join(stacks),
        states=states or {},
        reached=reached,
    )


def _snapshots(context: RankContext) -> tuple[Snapshot, ...]:
    """Return how far the plans of a rank are, asked again where it went on meanwhile."""
    for _ in range(TRIES):
        try:
            return tuple(thing.snapshot() for thing in context.inspectables)
        except (RuntimeError, IndexError, KeyError):  # a deque or a dict changed
            time.sleep(1e-3)
    return ()


def _waits_of(wait: RankWait) -> Waits:
    seconds = time.perf_counter() - wait.start
    return Waits(f"{wait.what}{wait.note}", seconds, tuple(wait.members), wait.meeting)


def _where(frame: FrameType | None) -> str:
    """Return the innermost line that is not of this package, else the innermost one."""
    if frame is None:
        return ""
    ours = (PACKAGE, "<frozen", sys.base_prefix + "/lib")
    lines = traceback.extract_stack(frame)
    place = lines[-1]
    for line in lines:
        if not line.filename.startswith(ours):
            place = line
    return f"{place.filename}:{place.lineno} in {place.name}"


# -- What can be seen, from outside, of a process on this host that does not answer ----------------
#
# Its state is what Linux says: stopped, waiting for a disk, running. Its stacks come by a signal,
# which Python's faulthandler answers in C, so also where one call keeps the interpreter busy for
# ever. It writes into memory of the silent process that has a file descriptor, and the sender of
# the signal reads that.


GONE = "its process has ended"
STATES = {
    "T": "it is stopped by a signal (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk or a file system",
    "R": "it runs, but a call keeps its interpreter busy",
    "S": "it sleeps in a call that keeps its interpreter busy",
    "Z": GONE,
    "X": GONE,
}
STACK_SECONDS = 0.5  # for the answer to the signal
SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9  # macOS has no such signals, and no /proc
_descriptors: list[int] = []  # memory for stacks, once there is any


def offer_stacks() -> int:
    """Answer the signal with the stacks of this process; return where they go, or -1."""
    if sys.platform != "linux":
        return -1
    if not _descriptors:
        if signal.getsignal(SIGNAL) != signal.SIG_DFL:
            return -1  # the program answers the signal itself
        _descriptors.append(os.memfd_create("mpipipe stacks"))
        faulthandler.register(SIGNAL, file=_descriptors[0], all_threads=True, chain=False)
    return _descriptors[0]


def stacks_of(place: RankPlace) -> str:
    """Return the stacks of a process on this host; "" for one that cannot answer."""
    text = ""
    if place.host == socket.gethostname() and state_of(place.pid) in (STATES["R"], STATES["S"]):
        with suppress(OSError):
            path = Path(f"/proc/{place.pid}/fd/{place.descriptor}")
            if "mpipipe stacks" in os.readlink(path):  # another program may have this id
                os.kill(place.pid, SIGNAL)
                time.sleep(STACK_SECONDS)
                text = path.read_text(errors="replace")
    return text


def state_of(pid: int) -> str:
    """Return the state of a process on this host, in words; "" where it cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        if Path("/proc/self/status").exists():
            return GONE
        return ""
    except OSError:
        return ""
    for line in lines:
        if line.startswith("State:"):
            return STATES.get(line.split()[1], "")
    return ""
