"""Control messages: of fixed size, and so small that MPI takes one at once, received or not.

So a rank tells the others of its end without waiting, also for a rank that is about to end itself.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, Request

MESSAGE_BYTES = 1024
HEAD = 3  # int64 numbers before the text: kind, source, number


class ControlKind(IntEnum):
    """What a control message says; it has one number."""

    # The sender cannot go on with this group; the number of the failure.
    FAILED = 0
    # The sender's script has ended after this call: a receiver in a later one fails.
    LEFT = 1
    # The sender makes no communicator with the receiver any more; the number of the failure.
    WITHDRAWN = 2


class ControlMessage(NamedTuple):
    """A control message that was received."""

    kind: ControlKind
    source: int
    number: int
    text: str


class ControlMessages:
    """The control messages of one rank, on a communicator without other point-to-point messages."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sending: list[Request] = []
        # a message that has arrived, and its buffer
        self.receiving: tuple[Request, np.ndarray] | None = None

    def send(self, peer: int, kind: ControlKind, number: int, text: str) -> None:
        """Start sending; never waits. A text that is too long is cut."""
        content = text.encode("utf-8", "backslashreplace")[: MESSAGE_BYTES - 8 * HEAD]
        message = np.zeros(MESSAGE_BYTES, np.uint8)
        message[: 8 * HEAD].view(np.int64)[:] = kind, self.comm.rank, number
        message[8 * HEAD : 8 * HEAD + len(content)] = np.frombuffer(content, np.uint8)
        self.sending.append(own(self.comm.Isend(message, peer, 0)))

    def read(self) -> list[ControlMessage]:
        """Return all messages that have arrived; never waits."""
        self.sending = [request for request in self.sending if not request.Test()]
        arrived = []
        while self.receiving is not None or self.comm.Iprobe():
            if self.receiving is None:
                buffer = np.empty(MESSAGE_BYTES, np.uint8)
                self.receiving = own(self.comm.Irecv(buffer)), buffer
            request, message = self.receiving
            if not request.Test():
                break
            self.receiving = None
            kind, source, number = message[: 8 * HEAD].view(np.int64).tolist()
            text = message[8 * HEAD :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
            arrived.append(ControlMessage(ControlKind(kind), source, number, text))
        return arrived
