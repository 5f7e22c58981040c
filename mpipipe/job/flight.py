"""The flight recorder: the last operations of a rank, which are read only when a job hangs.

An object that follows a plan knows how far it has come, and gives a `Snapshot` when it is asked (pipeline/diagnostics,
comm/ring_exchange). All other operations go into a ring of slots; each new one takes the oldest slot. Only references
and numbers are stored. Texts are made for a dump (watch/channel.py).
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple, Protocol

SLOTS = 256  # a power of two
ALL = -1  # in place of a peer, where all ranks of a group take part


class FlightRecorder:
    """The operations of one rank that are in no plan; `count` is how many have begun so far."""

    def __init__(self) -> None:
        self.count = 0
        # [what, peer, tag, bytes, "posted" or "done", time of the last change] of each of the last operations
        self.slots: list[list[Any]] = [["", ALL, None, 0, "done", 0.0] for _ in range(SLOTS)]

    def begin(self, what: object, peer: int = ALL, tag: int | None = None, nbytes: int = 0) -> int:
        """Note that an operation begins; return its number, for `end`."""
        number = self.count
        self.count = number + 1
        self.slots[number & SLOTS - 1][:] = what, peer, tag, nbytes, "posted", perf_counter()
        return number

    def end(self, number: int) -> None:
        if self.count - number <= SLOTS:
            slot = self.slots[number & SLOTS - 1]
            slot[4:] = "done", perf_counter()

    def last(self, most: int) -> list[str]:
        """Return the last operations as text, the oldest first."""
        lines, now = [], perf_counter()
        for number in range(max(0, self.count - min(most, SLOTS)), self.count):
            what, peer, tag, nbytes, state, then = self.slots[number & SLOTS - 1]
            facts = [state, f"{now - then:.3f} s ago"]
            facts += [] if peer == ALL else [f"peer {peer}"]
            facts += [] if tag is None else [f"tag {tag}"]
            facts += [f"{nbytes} bytes"] if nbytes else []
            lines.append(f"{what}: {', '.join(facts)}")
        return lines


class Message(NamedTuple):
    """A message, as sender and receiver name it alike."""

    name: tuple[int, ...]
    text: str
    peer: int  # rank in COMM_WORLD at the other end
    tag: tuple[int, int]  # channel, tag
    nbytes: int | None  # None if it is not known


class Snapshot(NamedTuple):
    """How far an object that follows a plan has come on this rank, as values that can be pickled."""

    key: tuple[int, ...]  # the same for this object on all ranks
    doing: str = ""  # the action under way, in words; "" between calls
    computes: bool = False  # whether that action runs code of the user, or of a layer, rather than waits for a message
    stage: int | None = None  # of that action
    microbatch: int | None = None
    thread: int = 0  # which runs it
    expects: Message | None = None  # the message that is waited for
    sent: tuple[Message, ...] = ()  # the last messages sent, in this call
    skipped: tuple[Message, ...] = ()  # messages that should have been sent by now, by the plan, and were not
    operations: tuple[str, ...] = ()  # the last ones, as text
    call: int = 0  # number of the call under way, or of the last one, on all ranks; messages have names within it


class Inspectable(Protocol):
    """An object that follows a plan."""

    def progress_token(self) -> object:
        """Return a value that changes with every progress; called often, from any thread."""

    def snapshot(self) -> Snapshot:
        """Return how far it has come; called from any thread, while it runs."""
