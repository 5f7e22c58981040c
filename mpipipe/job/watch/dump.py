"""What a rank says of itself when a job hangs, and what can be seen of it from outside."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeAlias

from mpipipe.job import report
from mpipipe.job.context import RankContext
from mpipipe.job.types import GroupName, Meeting, Ranks, Snapshot
from mpipipe.job.wait import LongWait


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
    active: tuple[Snapshot, ...]  # the plans that are in an action
    ended: bool  # whether its program is over
    where: str  # the line of code that it is in
    # The number of the last call that it has begun, of all that it may come to by itself: none
    # where a thread waits and another goes on.
    reached: Mapping[GroupName, int] | None = None


Dumps: TypeAlias = Mapping[int, Dump]  # world rank -> what it says


def make_dump(context: RankContext, rank: int, quiet: float) -> Dump:
    """Describe a rank that has been quiet so long."""
    reached = None
    if context.single_threaded(context.thread):
        reached = {group.key: group.calls for group in tuple(context.groups)} | context.makings
    snapshots = [thing.snapshot() for thing in context.inspectables]
    active = tuple(snapshot for snapshot in snapshots if snapshot.doing)
    thread = context.thread
    if active:
        thread = active[0].thread
    return Dump(
        rank=rank,
        host=socket.gethostname(),
        quiet=quiet,
        waits=tuple(map(_waits_of, tuple(context.long_waits))),
        active=active,
        ended=context.ended,
        where=_where(sys._current_frames().get(thread or 0)),
        reached=reached,
    )


def _waits_of(wait: LongWait) -> Waits:
    seconds = time.perf_counter() - wait.start
    return Waits(f"{wait.what}{wait.note}", seconds, wait.members, wait.meeting)


def _where(frame: FrameType | None) -> str:
    """Return the innermost line of the user's own code, else the innermost one."""
    if frame is None:
        return ""
    lines = traceback.extract_stack(frame)
    place = report.users_frame(lines) or lines[-1]
    return f"{place.filename}:{place.lineno} in {place.name}"


# -- What can be seen, from outside, of a process on this host that does not answer ----------------
#
# Its state is what Linux says: stopped, waiting for a disk, running.


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


class RankPlace(NamedTuple):
    """Where a rank runs, and how it can be watched from outside."""

    host: str  # "" for a rank that has said nothing of itself
    pid: int
    threaded: bool  # whether its watchdog answers while it computes

    @property
    def state(self) -> str:
        """The state of the process, in words; "" where it cannot be known, as on another host."""
        if self.host != socket.gethostname():
            return ""
        try:
            return STATES.get(process_fields(self.pid)[0], "")
        except FileNotFoundError:
            if Path("/proc/self/stat").exists():
                return GONE
        except OSError:
            pass
        return ""


def process_fields(process: int | str) -> list[str]:
    """Return fields of proc_pid_stat(5) from the third one on, the state. Raises OSError."""
    # The name, in parentheses, is cut after 15 bytes, which may be within a character.
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


UNKNOWN = RankPlace("", 0, True)
