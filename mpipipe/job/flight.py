"""How far objects that follow a plan have come, which is asked only when a job hangs.

Such an object gives a `Snapshot` (pipeline/state, comm/ring_exchange).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """A message, as sender and receiver name it alike."""

    name: tuple[int, ...]
    text: str
    peer: int  # rank in COMM_WORLD at the other end
    tag: tuple[int, int]  # channel, tag
    nbytes: int | None  # None if it is not known


class Snapshot(NamedTuple):
    """How far an object that follows a plan has come, as values that can be pickled."""

    key: tuple[int, ...]  # the same for this object on all ranks
    doing: str = ""  # the action under way, in words; "" between calls
    # Whether that action runs code of the user, or of a layer, rather than waits for a message.
    computes: bool = False
    stage: int | None = None  # the stage of that action
    microbatch: int | None = None
    thread: int = 0  # the one that runs it
    expects: Message | None = None  # the message that is waited for
    sent: tuple[Message, ...] = ()  # the last messages sent, in this call
    # Messages that should have been sent by now, by the plan, and were not.
    skipped: tuple[Message, ...] = ()
    # Number of the call under way, or of the last one, on all ranks; messages have names within it.
    call: int = 0


class Inspectable(Protocol):
    """An object that follows a plan."""

    def progress_token(self) -> object:
        """Return a value that changes with every progress; called often, from any thread."""

    def snapshot(self) -> Snapshot:
        """Return how far it has come; called from any thread, while it runs."""
