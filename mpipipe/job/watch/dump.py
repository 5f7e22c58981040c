"""What a rank says of itself when a job hangs, and what can be seen of it from outside."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import NamedTuple, TypeAlias

from mpipipe.job import report
from mpipipe.job.context import RankContext
from mpipipe.job.flight import Snapshot
from mpipipe.job.types import GroupName, Meeting, Ranks, RankWait

TRIES = 5  # a list may change while another thread reads it


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

    @property
    def active(self) -> list[Snapshot]:
        """The plans that are in an action."""
        return [snapshot for snapshot in self.snapshots if snapshot.doing]


Dumps: TypeAlias = Mapping[int, Dump]  # world rank -> what it says


def make_dump(context: RankContext, rank: int, quiet: float, states: Mapping[int, str]) -> Dump:
    """Describe a rank that has been quiet so long; with its stacks, if that is the limit."""
    stacks = ""
    if quiet >= context.watch_limit:
        with suppress(OSError), TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stacks = file.read()
    reached = None
    if context.single_threaded(context.thread):
        reached = {group.key: group.calls for group in tuple(context.groups)} | context.makings
    dump = Dump(
        rank=rank,
        host=socket.gethostname(),
        quiet=quiet,
        waits=tuple(map(_waits_of, tuple(context.long_waits))),
        snapshots=_snapshots(context),
        ended=context.ended,
        where="",
        stacks=stacks,
        states=states,
        reached=reached,
    )
    thread = context.thread
    for snapshot in dump.active[:1]:
        thread = snapshot.thread
    return dump._replace(where=_where(sys._current_frames().get(thread or 0)))


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
    """Return the innermost line of the user's own code, else the innermost one."""
    if frame is None:
        return ""
    lines = traceback.extract_stack(frame)
    place = report.users_frame(lines) or lines[-1]
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
BUSY = (STATES["R"], STATES["S"])
STACK_SECONDS = 0.5  # for the answer to the signal
SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9  # macOS has no such signals, and no /proc
_descriptors: list[int] = []  # memory for stacks, once there is any


class RankPlace(NamedTuple):
    """Where a rank runs, and how it can be watched from outside."""

    host: str  # "" for a rank that has said nothing of itself
    pid: int
    threaded: bool  # whether its watchdog answers while it computes
    descriptor: int  # its stacks, see offer_stacks

    @property
    def state(self) -> str:
        """The state of a process on this host, in words; "" where it cannot be known."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except FileNotFoundError:
            if Path("/proc/self/status").exists():
                return GONE
            return ""
        except OSError:
            return ""
        letter = status.partition("State:")[2].strip()[:1]
        return STATES.get(letter, "")

    def stacks(self) -> str:
        """Return the stacks of a process on this host; "" for one that cannot answer."""
        text = ""
        if self.host == socket.gethostname() and self.state in BUSY:
            with suppress(OSError):
                path = Path(f"/proc/{self.pid}/fd/{self.descriptor}")
                if "mpipipe stacks" in os.readlink(path):  # another program may have this id
                    os.kill(self.pid, SIGNAL)
                    time.sleep(STACK_SECONDS)
                    text = path.read_text(errors="replace")
        return text


UNKNOWN = RankPlace("", 0, True, -1)


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
