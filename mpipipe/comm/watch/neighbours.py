"""What Linux says of a process on this host that does not answer: stopped, waiting for a disk, or gone."""

from __future__ import annotations

from pathlib import Path

STATES = {
    "T": "it is stopped by a signal (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk or a file system",
    "R": "it runs, but its interpreter is busy",
    "S": "it sleeps in a call that keeps its interpreter busy",
    "Z": "its process has ended",
    "X": "its process has ended",
}
SWAPPING = 0.1  # of its memory swapped out: then it is named as swapping


def state_of(pid: int) -> str:
    """The state of a process on this host, in words; "" where it cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return "its process has ended" if Path("/proc/self/status").exists() else ""
    except OSError:
        return ""
    facts = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    text = STATES.get(facts.get("State", ["?"])[0], "")
    swapped, resident = (int(facts.get(name, ["0"])[0]) for name in ("VmSwap", "VmRSS"))
    if swapped > SWAPPING * (swapped + resident):
        text += f"; {swapped >> 10} MiB of its memory are swapped out"
    return text
