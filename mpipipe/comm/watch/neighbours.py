"""What can be seen, from outside, of a process on this host that does not answer: its state, and its Python stacks.

The state is what Linux says: stopped, waiting for a disk, running. Stacks come from a signal, which Python's
faulthandler answers in C, so also where one call keeps the interpreter busy for ever. It writes into memory of the
silent process that has a file descriptor, and whoever sent the signal reads that.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
SWAPPING = 0.1  # of its memory swapped out: then it is named as swapping
STACK_SECONDS = 0.5  # for the answer to the signal
_descriptors: list[int] = []  # of the memory for stacks, once there is any


class Seen(NamedTuple):
    """What was seen of a process: its state in words, and its stacks; "" for what cannot be known."""

    state: str
    stacks: str


def offer_stacks() -> int:
    """Answer the signal with the stacks of this process; returns the descriptor of what is written, -1 without one."""
    if sys.platform != "linux":
        return -1
    if not _descriptors:
        if signal.getsignal(_signal()) is not signal.SIG_DFL:  # somebody else uses it
            return -1
        _descriptors.append(os.memfd_create("mpipipe stacks"))
        faulthandler.register(_signal(), file=_descriptors[0], all_threads=True, chain=False)
    return _descriptors[0]


def look_at(pid: int, descriptor: int) -> Seen:
    """What can be seen of a process on this host whose `offer_stacks` returned `descriptor`."""
    state = state_of(pid)
    answers = state in (STATES["R"], STATES["S"])
    return Seen(state, _stacks_of(pid, descriptor) if answers and descriptor >= 0 else "")


def state_of(pid: int) -> str:
    """The state of a process on this host, in words; "" where it cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return GONE if Path("/proc/self/status").exists() else ""
    except OSError:
        return ""
    facts = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    text = STATES.get(facts.get("State", ["?"])[0], "")
    swapped, resident = (int(facts.get(name, ["0"])[0]) for name in ("VmSwap", "VmRSS"))
    if swapped > SWAPPING * (swapped + resident):
        text += f"; {swapped >> 10} MiB of its memory are swapped out"
    return text


def _stacks_of(pid: int, descriptor: int) -> str:
    place = Path(f"/proc/{pid}/fd/{descriptor}")
    with suppress(OSError):
        if "mpipipe stacks" not in os.readlink(place):  # another program has this process id by now
            return ""
        os.kill(pid, _signal())
        deadline, text = time.monotonic() + STACK_SECONDS, ""
        while time.monotonic() < deadline:
            before, text = text, place.read_text(errors="replace")
            if text and text == before:
                return text
            time.sleep(STACK_SECONDS / 10)
    return ""


def _signal() -> int:
    return signal.SIGRTMIN + 9
