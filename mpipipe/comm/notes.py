"""Short notes between the ranks of a group, beside all other traffic: who failed, who left, who waits for whom.

A note is a message of fixed size, so small that every MPI takes it at once, whether anybody receives it or not. So
telling others never waits, not even for a rank that is itself about to end. Notes travel on a communicator of their
own, and whoever waits looks for them: see wait.py for when, and presence.py for what they mean together.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mpipipe.comm.requests import own
from mpipipe.comm.types import Communicator, Request

NOTE_BYTES = 1024
HEAD = 3  # int64 numbers before the text: kind, source, call


class Kind(IntEnum):
    """What a note says."""

    FAILED = 0  # the sender cannot go on with this group; `call` is the number of the failure
    LEFT = 1  # the sender's script has ended after `call`
    WAITING = 2  # the sender waits for all ranks in `call`; goes to rank 0, which answers each with HERE
    HERE = 3  # rank 0 has come to `call`, too
    ELSEWHERE = 4  # the sender waits for the receiver in `call` of this group, and the receiver waits in another group
    WITHDRAWN = 5  # the sender makes no communicator with the receiver any more; `call` is the number of a failure


class Note(NamedTuple):
    """A note that was received."""

    kind: Kind
    source: int
    call: int
    text: str


class Notes:
    """The notes of one rank on a private communicator, on which no other point-to-point message travels."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sending: list[Request] = []
        self.receiving: tuple[Request, np.ndarray] | None = None  # a note that has arrived, and its buffer

    def send(self, peer: int, kind: Kind, call: int, text: str) -> None:
        """Start sending; never waits. A text that is too long is cut."""
        note = np.zeros(NOTE_BYTES, np.uint8)
        note[: 8 * HEAD].view(np.int64)[:] = kind, self.comm.rank, call
        data = np.frombuffer(text.encode("utf-8", "backslashreplace")[: NOTE_BYTES - 8 * HEAD], np.uint8)
        note[8 * HEAD :][: data.size] = data
        self.all_sent()
        self.sending.append(own(self.comm.Isend(note, peer, 0)))

    def read(self) -> list[Note]:
        """All notes that have arrived; never waits."""
        if self.sending:
            self.all_sent()  # drops those that have left
        arrived = []
        while self.receiving is not None or self.comm.Iprobe():
            if self.receiving is None:
                buffer = np.empty(NOTE_BYTES, np.uint8)
                self.receiving = own(self.comm.Irecv(buffer)), buffer
            request, note = self.receiving
            if not request.Test():
                break
            self.receiving = None
            kind, source, call = note[: 8 * HEAD].view(np.int64).tolist()
            text = note[8 * HEAD :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
            arrived.append(Note(Kind(kind), source, call, text))
        return arrived

    def all_sent(self) -> bool:
        """Whether every note has left this rank."""
        self.sending = [request for request in self.sending if not request.Test()]
        return not self.sending
