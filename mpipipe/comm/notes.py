"""Short notes between the ranks of a group, beside all other traffic: who failed, who left, who waits for whom.

A note is a message of fixed size, small enough for every MPI to take at once, whether anybody receives it or not.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mpipipe.comm.requests import own

NOTE_BYTES = 1024
HEAD = 3  # kind, source, call


class Kind(IntEnum):
    """What a note says."""

    FAILED = 0  # the sender cannot go on with this group; in place of the call, the number of the failure
    LEFT = 1  # the sender's script has ended after `call`
    WAITING = 2  # the sender waits for all ranks in `call`; goes to rank 0, which answers each with HERE
    HERE = 3  # rank 0 has come to `call`, too
    ELSEWHERE = 4  # the sender waits for the receiver in `call` of this group, and the receiver waits in another group


class Note(NamedTuple):
    """A note, as it was received."""

    kind: Kind
    source: int
    call: int
    text: str


class Notes:
    """The notes of one rank on a private communicator, on which no other point-to-point message travels."""

    def __init__(self, comm):
        self.comm = comm
        self.sending: list = []
        self.receiving: tuple | None = None  # (request, buffer) of a note that has arrived

    def send(self, peer: int, kind: Kind, call: int, text: str):
        """Start sending; never waits."""
        note = np.zeros(NOTE_BYTES, np.uint8)
        note[: 8 * HEAD].view(np.int64)[:] = kind, self.comm.rank, call
        data = np.frombuffer(text.encode("utf-8", "backslashreplace")[: NOTE_BYTES - 8 * HEAD], np.uint8)
        note[8 * HEAD :][: data.size] = data
        self.sending = [request for request in self.sending if not request.Test()]
        self.sending.append(own(self.comm.Isend(note, peer, 0)))

    def read(self) -> list[Note]:
        """All notes that have arrived; never waits."""
        found = []
        while self.receiving is not None or self.comm.Iprobe():
            if self.receiving is None:
                note = np.empty(NOTE_BYTES, np.uint8)
                self.receiving = own(self.comm.Irecv(note)), note
            request, note = self.receiving
            if not request.Test():
                break
            self.receiving = None
            kind, source, call = note[: 8 * HEAD].view(np.int64).tolist()
            text = note[8 * HEAD :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
            found.append(Note(Kind(kind), source, call, text))
        return found

    def gone(self) -> bool:
        """Whether all that was sent has gone."""
        self.sending = [request for request in self.sending if not request.Test()]
        return not self.sending
