"""Exchanges of all ranks of a communicator: one message out, one in, next to computation.

`overlap` starts a receive and a send, which advance whenever the caller polls. `sendrecv` waits for
the same exchange before the computation. The data are the same either way. A ring has one exchange
under way; others may have several, which all ranks start in one order.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import NamedTuple

from mpipipe.arrays import Array
from mpipipe.comm.transport.gpu_aware import make_transport
from mpipipe.job import Communicator, Request, Snapshot, group_of, own

ROTATIONS = ("overlap", "sendrecv")
TAG = 1


class RingMessage(NamedTuple):
    """One message of an exchange, with its number and the rank at its other end."""

    what: str
    number: int
    peer: int
    nbytes: int
    receives: bool

    @property
    def subject(self) -> str:
        return f"message {self.number} of the {self.what}"

    def __str__(self) -> str:
        if self.receives:
            return f"{self.subject} from rank {self.peer} (tag {TAG}, {self.nbytes} bytes)"
        return f"{self.subject} to be received by {self.peer}"


class RingExchange:
    """Messages of all ranks, on a private duplicate; collective. Texts call it `what`."""

    def __init__(
        self, comm: Communicator, synchronous: bool = False, device: str = "cpu", what: str = "ring"
    ) -> None:
        self.what = what
        self.group = group_of(comm)
        self.transport = make_transport(comm, 1, synchronous, device, self.group)
        self.pending: deque[tuple[RingMessage, Request]] = deque()
        self.started = self.polls = 0
        self.thread = 0  # the one that has started the last exchange
        self.group.context.add_inspectable(self)

    def start(
        self, mode: str, outgoing: Array | None, dest: int, incoming: Array | None, source: int
    ) -> None:
        """Send one C-contiguous array and receive another; None is no message.

        Both are in use until `finish`.

        On a device, the send follows all work queued on the current stream so far, and no later
        work may change the outgoing array. Work queued after `finish` finds the received data.
        """
        self.started += 1
        self.thread = get_ident()
        transport = self.transport
        if incoming is not None:
            message = RingMessage(self.what, self.started, source, incoming.nbytes, True)
            self.pending.append((message, own(transport.irecv(incoming, source, 0, TAG))))
        if outgoing is not None:
            message = RingMessage(self.what, self.started, dest, outgoing.nbytes, False)
            self.pending.append((message, own(transport.isend(outgoing, dest, 0, TAG))))
        if mode == "sendrecv":
            self.finish()

    def poll(self) -> None:
        self.polls += 1
        if not self.transport.progress() and self.pending:
            self.pending[0][1].Test()

    def finish(self) -> None:
        while self.pending:
            message, request = self.pending[0]
            self.group.wait(request, message, message.peer)
            self.pending.popleft()

    # -- for the report of a hang ------------------------------------------------------------------

    def progress_token(self) -> object:
        return self.started, self.polls, len(self.pending)

    def snapshot(self) -> Snapshot:
        try:
            message, _ = self.pending[0]
        except IndexError:
            return Snapshot()
        return Snapshot(f"exchange {message.number} of a {self.what}", True, self.thread)

    def close(self) -> None:
        """Free the communicator; collective."""
        self.transport.close()
