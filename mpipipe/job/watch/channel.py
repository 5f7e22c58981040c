"""Messages between the watchdogs of several ranks, and what they say. Only the ranks that open a
channel wait here.
"""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import numpy as np

from mpipipe.job import communicators, runtime
from mpipipe.job.communicators import wait_for_ranks
from mpipipe.job.context import RankContext
from mpipipe.job.flight import Snapshot
from mpipipe.job.requests import own
from mpipipe.job.types import MpiCommunicator, Request
from mpipipe.job.wait import LongWait

PLACE_BYTES = 64


class WatchMessage(NamedTuple):
    """A question where each rank is, or an answer to it, a Dump.

    `probe` names what it belongs to: (world rank that asks, count of its questions). A question has
    the ranks on the host of the one that is asked, which have not answered, and which that is to
    look at.
    """

    source: int
    probe: tuple[int, int]
    content: Sequence[int] | Dump


class RankPlace(NamedTuple):
    """Where a rank runs, whether its watchdog answers while it computes, and where its stacks can
    be read.
    """

    host: str  # "" for a rank that has said nothing of itself
    pid: int
    threaded: bool
    descriptor: int  # see offer_stacks


UNKNOWN = RankPlace("", 0, True, -1)


class WatchChannel:
    """The watchdogs of the ranks of a communicator, which has no other messages; `members` are
    ranks of COMM_WORLD.
    """

    def __init__(
        self, comm: MpiCommunicator, members: tuple[int, ...], places: Sequence[RankPlace]
    ) -> None:
        self.comm = comm
        self.members = members
        self.places = places
        self.rank = comm.rank
        self._status = runtime.mpi().Status()
        self._sending: list[Request] = []
        self._receiving: tuple[Request, np.ndarray, int] | None = None

    def send(self, peer: int, probe: tuple[int, int], content: Sequence[int] | Dump) -> None:
        data = np.frombuffer(pickle.dumps((probe, content)), np.uint8)
        self._sending = [request for request in self._sending if not request.Test()]
        self._sending.append(own(self.comm.Isend(data, peer)))

    def read(self) -> list[WatchMessage]:
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
            arrived.append(WatchMessage(source, *pickle.loads(buffer.tobytes())))
        self._sending = [request for request in self._sending if not request.Test()]
        return arrived


def threads_allowed() -> bool:
    """Return whether MPI takes calls from several threads at once."""
    MPI = runtime.mpi()
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def open_channel(comm: MpiCommunicator, members: tuple[int, ...]) -> WatchChannel:
    """Return the channel of the ranks of `comm`, on a duplicate; collective."""
    private = communicators.duplicate(comm)
    private.Set_name("mpipipe watchdog")
    row = np.zeros(PLACE_BYTES, np.uint8)
    table = np.empty((comm.size, PLACE_BYTES), np.uint8)
    mine = f"{os.getpid()} {threads_allowed():d} {offer_stacks()} {socket.gethostname()}".encode()[
        :PLACE_BYTES
    ]
    row[: len(mine)] = np.frombuffer(mine, np.uint8)
    wait_for_ranks(own(private.Iallgather(row, table)), "the hosts of all ranks", members)
    places = [
        line.tobytes().rstrip(b"\0").decode("utf-8", "replace").split(" ", 3) for line in table
    ]
    return WatchChannel(
        private,
        members,
        [RankPlace(host, int(pid), t == "1", int(d)) for pid, t, d, host in places],
    )


# -- What one rank says of itself when a job hangs -------------------------------------------------


TRIES = 5  # a list may change while another thread reads it
PACKAGE = str(Path(__file__).parents[2])
Item = TypeVar("Item")


class Waits(NamedTuple):
    """One wait under way, as other ranks see it."""

    text: str  # what for
    seconds: float  # how long
    peers: tuple[int, ...]  # world ranks that must come, each of which may be the reason
    meeting: (
        tuple[tuple[int, ...], str] | None
    )  # equal on all ranks that wait for each other; None: one peer must come


class Dump(NamedTuple):
    """What one rank says of itself, at one moment."""

    rank: int  # in COMM_WORLD
    host: str
    quiet: float  # seconds without progress
    waits: tuple[Waits, ...]
    snapshots: tuple[Snapshot, ...]  # how far it has come in each plan
    ended: bool  # whether its program is over
    where: str  # the line of code that it is in
    stacks: str  # of all its threads
    neighbours: Mapping[int, Seen]  # by world rank: processes on this host that do not answer


def make_dump(
    context: RankContext,
    rank: int,
    quiet: float,
    neighbours: Mapping[int, Seen] | None = None,
    watcher: int | None = None,
) -> Dump:
    """Describe this rank, `quiet` seconds without progress, and its `neighbours`; the thread
    `watcher` is left out.
    """
    snapshots = _patiently(lambda: tuple(thing.snapshot() for thing in context.inspectables))
    waits = _patiently(
        lambda: tuple(_waits_of(long_wait) for long_wait in tuple(context.long_waits))
    )
    busy = next((snapshot.thread for snapshot in snapshots if snapshot.doing), context.thread)
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)}, most recent call "
        f"last:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames.items()
        if number != watcher
    ]
    return Dump(
        rank=rank,
        host=socket.gethostname(),
        quiet=quiet,
        waits=waits,
        snapshots=snapshots,
        ended=context.ended,
        where=_where(frames.get(busy or 0)),
        stacks="\n".join(stacks),
        neighbours=neighbours or {},
    )


def _patiently(make: Callable[[], tuple[Item, ...]]) -> tuple[Item, ...]:
    """Return `make()`, tried again where the rank went on meanwhile."""
    for _ in range(TRIES):
        try:
            return make()
        except (RuntimeError, IndexError, KeyError):  # a deque or a dict changed
            time.sleep(1e-3)
    return ()


def _waits_of(long_wait: LongWait) -> Waits:
    group = long_wait.group
    seconds = time.perf_counter() - long_wait.start
    text = str(long_wait.what)
    if group is None:
        members = tuple(sorted(long_wait.absent))
        return Waits(text, seconds, members, (members, text) if members else None)
    if long_wait.everyone or long_wait.peer is None:
        return Waits(text, seconds, group.members, (group.key, text))
    peer = group.members[long_wait.peer]
    text += "" if peer == long_wait.peer else f", which is rank {peer} of the job"
    return Waits(text, seconds, (peer,), None)


def _where(frame: FrameType | None) -> str:
    """Return the innermost line that is not of this package, else the innermost one."""
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    users = [
        line
        for line in stack
        if not line.filename.startswith((PACKAGE, "<frozen", sys.base_prefix + "/lib"))
    ]
    innermost = users[-1] if users else stack[-1]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"


# -- What can be seen, from outside, of a process on this host that does not answer: its state, and its Python stacks
#
# The state is what Linux says: stopped, waiting for a disk, running. Stacks come from a signal,
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
_descriptors: list[int] = []  # of the memory for stacks, once there is any


class Seen(NamedTuple):
    """What was seen of a process: its state in words, and its stacks; "" for what cannot be
    known.
    """

    state: str
    stacks: str


def offer_stacks() -> int:
    """Answer the signal with the stacks of this process; return the descriptor of what is written,
    -1 without one.
    """
    if sys.platform != "linux":
        return -1
    if not _descriptors:
        if signal.getsignal(_signal()) is not signal.SIG_DFL:  # somebody else uses it
            return -1
        _descriptors.append(os.memfd_create("mpipipe stacks"))
        faulthandler.register(_signal(), file=_descriptors[0], all_threads=True, chain=False)
    return _descriptors[0]


def look_at(pid: int, descriptor: int) -> Seen:
    """Return what can be seen of a process on this host whose `offer_stacks` returned
    `descriptor`.
    """
    state = state_of(pid)
    answers = state in (STATES["R"], STATES["S"])
    return Seen(state, _stacks_of(pid, descriptor) if answers and descriptor >= 0 else "")


def state_of(pid: int) -> str:
    """Return the state of a process on this host, in words; "" where it cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return GONE if Path("/proc/self/status").exists() else ""
    except OSError:
        return ""
    letter = next((line.split()[1] for line in lines if line.startswith("State:")), "")
    return STATES.get(letter, "")


def _stacks_of(pid: int, descriptor: int) -> str:
    place = Path(f"/proc/{pid}/fd/{descriptor}")
    with suppress(OSError):
        if "mpipipe stacks" not in os.readlink(place):  # another program has this process id by now
            return ""
        os.kill(pid, _signal())
        deadline = time.monotonic() + STACK_SECONDS
        text = ""
        while time.monotonic() < deadline:
            before = text
            text = place.read_text(errors="replace")
            if text and text == before:
                return text
            time.sleep(STACK_SECONDS / 10)
    return ""


def _signal() -> int:
    return signal.SIGRTMIN + 9
