"""What one rank tells of itself when a job hangs. Texts are made here, from what the flight recorder keeps."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

from mpipipe.comm.flight import Account
from mpipipe.comm.process import Process
from mpipipe.comm.wait import Vigil
from mpipipe.comm.watch.neighbours import Seen

OPERATIONS = 24  # the last ones, of what is in no plan
TRIES = 5  # a list may change while another thread reads it
PACKAGE = str(Path(__file__).parents[2])
Entry = TypeVar("Entry")


class Waits(NamedTuple):
    """One wait under way.

    Attributes
    ----------
    text : what for
    seconds : how long
    peers : world ranks that must come, each of which may be the reason
    meeting : the same for all ranks that wait for each other in this; None if one peer must come
    """

    text: str
    seconds: float
    peers: tuple[int, ...]
    meeting: tuple[tuple[int, ...], str] | None


class Dump(NamedTuple):
    """One rank, at one moment.

    Attributes
    ----------
    rank : in COMM_WORLD
    quiet : seconds without progress
    waits, accounts : what it waits for, and how far it has come in each plan
    ended : whether its program is over
    where : the line of code that it is in, as text
    stacks : of all its threads
    operations : the last ones that are in no plan, as text
    neighbours : world rank -> what was seen of the process, of ranks on this host that do not answer
    """

    rank: int
    host: str
    quiet: float
    waits: tuple[Waits, ...]
    accounts: tuple[Account, ...]
    ended: bool
    where: str
    stacks: str
    operations: tuple[str, ...]
    neighbours: Mapping[int, Seen]


def make_dump(
    process: Process, rank: int, quiet: float, neighbours: Mapping[int, Seen] | None = None, watcher: int = 0
) -> Dump:
    """Describe this rank.

    Parameters
    ----------
    process : Process
        Of this rank.
    rank : int
        In COMM_WORLD.
    quiet : float
        Seconds without progress.
    neighbours : mapping
        World rank -> what was seen of it, for ranks that do not answer.
    watcher : int
        The watchdog's own thread, which is left out.
    """
    accounts = _patiently(lambda: tuple(each.account() for each in process.accountable))
    waits = _patiently(lambda: tuple(_waits_of(vigil) for vigil in tuple(process.vigils)))
    busy = next((account.thread for account in accounts if account.doing), process.thread)
    frames = sys._current_frames()
    return Dump(
        rank=rank,
        host=socket.gethostname(),
        quiet=quiet,
        waits=waits,
        accounts=accounts,
        ended=process.ended,
        where=_where(frames.get(busy or 0)),
        stacks=_stacks(frames, watcher),
        operations=tuple(process.flight.last(OPERATIONS)),
        neighbours=neighbours or {},
    )


def _patiently(make: Callable[[], tuple[Entry, ...]]) -> tuple[Entry, ...]:
    """`make()`, again where the rank went on meanwhile."""
    for _ in range(TRIES):
        try:
            return make()
        except (RuntimeError, IndexError, KeyError):  # a deque or a dict changed
            time.sleep(1e-3)
    return ()


def _waits_of(vigil: Vigil) -> Waits:
    group, seconds, text = vigil.group, time.perf_counter() - vigil.start, str(vigil.what)
    if group is None:
        members = tuple(sorted(vigil.absent))
        return Waits(text, seconds, members, (members, text) if members else None)
    if vigil.everyone or vigil.peer is None:
        return Waits(text, seconds, group.presence.members, (group.key, text))
    peer = group.presence.members[vigil.peer]
    text += "" if peer == vigil.peer else f", which is rank {peer} of the job"
    return Waits(text, seconds, (peer,), None)


def _where(frame: FrameType | None) -> str:
    """The innermost line that is not of this package, else the innermost one."""
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    users = [each for each in stack if not each.filename.startswith((PACKAGE, "<frozen", sys.base_prefix + "/lib"))]
    found = users[-1] if users else stack[-1]
    return f"{found.filename}:{found.lineno} in {found.name}"


def _stacks(frames: Mapping[int, FrameType], watcher: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for number, frame in frames.items():
        if number != watcher:
            lines = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(number, number)}, most recent call last:\n{lines}")
    return "\n".join(parts)
