"""The flight recorder: the last operations of a rank, which are read only when a job hangs.

An object that follows a plan knows how far it has come, and gives a `Snapshot` when it is asked (pipeline/diagnostics,
comm/ring_exchange). All others are agreements, and the last ones are kept. Only references and numbers are stored;
texts are made for a dump (watch/channel.py).
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any, NamedTuple, Protocol

KEPT = 256


class FlightRecorder:
    """The agreements of one rank; `count` is how many have begun so far."""

    def __init__(self) -> None:
        self.count = 0
        self.operations: deque[list[Any]] = deque(maxlen=KEPT)  # [what, "posted" or "done", time of the last change]

    def begin(self, what: object) -> list[Any]:
        """Note that an agreement begins; return what `end` takes."""
        self.count += 1
        self.operations.append([what, "posted", perf_counter()])
        return self.operations[-1]

    def end(self, operation: list[Any]) -> None:
        operation[1:] = "done", perf_counter()

    def last(self, most: int) -> list[str]:
        """Return the last ones as text, the oldest first."""
        now = perf_counter()
        return [f"{what}: {state}, {now - then:.3f} s ago" for what, state, then in list(self.operations)[-most:]]


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
