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
from mpipipe.job import Communicator, Message, Request, Snapshot, group_of, own

ROTATIONS = ("overlap", "sendrecv")
TAG = 1
KEPT = 8  # exchanges that a report of a hang knows, for each rank


class RingMessages(NamedTuple):
    """One message out and one in, with their number and both ends.

    One of None bytes is not sent.
    """

    what: str
    number: int
    dest: int
    source: int
    bytes_out: int | None
    bytes_in: int | None
    thread: int

    @property
    def subject(self) -> str:
        return f"message {self.number} of the {self.what}"

    def __str__(self) -> str:
        return f"{self.subject} from rank {self.source} (tag {TAG}, {self.bytes_in or 0} bytes)"


class RingExchange:
    """Messages of all ranks, on a private duplicate; collective. Texts call it `what`."""

    def __init__(
        self, comm: Communicator, synchronous: bool = False, device: str = "cpu", what: str = "ring"
    ) -> None:
        self.what = what
        self.group = group_of(comm)
        self.transport = make_transport(comm, 1, synchronous, device, self.group)
        # The flag says whether it is a receive.
        self.pending: deque[tuple[RingMessages, bool, Request]] = deque()
        self.started = self.polls = 0
        self.last: deque[RingMessages] = deque(maxlen=KEPT * self.group.size)
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
        bytes_out = getattr(outgoing, "nbytes", None)
        bytes_in = getattr(incoming, "nbytes", None)
        now = RingMessages(self.what, self.started, dest, source, bytes_out, bytes_in, get_ident())
        self.last.append(now)
        if incoming is not None:
            self.pending.append((now, True, own(self.transport.irecv(incoming, source, 0, TAG))))
        if outgoing is not None:
            self.pending.append((now, False, own(self.transport.isend(outgoing, dest, 0, TAG))))
        if mode == "sendrecv":
            self.finish()

    def poll(self) -> None:
        self.polls += 1
        if not self.transport.progress() and self.pending:
            self.pending[0][2].Test()

    def finish(self) -> None:
        while self.pending:
            exchange, receives, request = self.pending[0]
            what: object = exchange
            peer = exchange.source
            if not receives:
                what = f"{exchange.subject} to be received by {exchange.dest}"
                peer = exchange.dest
            self.group.wait(request, what, peer)
            self.pending.popleft()

    # -- for the report of a hang ------------------------------------------------------------------

    def progress_token(self) -> object:
        return self.started, self.polls, len(self.pending)

    def snapshot(self) -> Snapshot:
        doing = ""
        expects = None
        for now, receives, _ in tuple(self.pending)[:1]:
            doing = f"exchange {now.number} of a {self.what}"
            if receives:
                expects = self._message(now, now.source, now.bytes_in)
        thread = 0
        sent = []
        for earlier in tuple(self.last):
            thread = earlier.thread
            if earlier.bytes_out is not None:
                sent.append(self._message(earlier, earlier.dest, earlier.bytes_out))
        return Snapshot(
            self.group.key,
            doing=doing,
            computes=doing != "",
            thread=thread,
            expects=expects,
            sent=tuple(sent),
        )

    def _message(self, messages: RingMessages, peer: int, nbytes: int | None) -> Message:
        member = self.group.members[peer]
        return Message((messages.number,), messages.subject, member, (0, TAG), nbytes)

    def close(self) -> None:
        """Free the communicator; collective."""
        self.transport.close()
