"""Exchanges of all ranks of a communicator: one message out, one in, next to computation.

`overlap` starts a receive and a send, which advance whenever the caller polls. `sendrecv` waits for
the same exchange before the computation. The data are the same either way. A ring has one exchange
under way; others may have several, which all ranks start in one order.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident

from mpipipe.arrays import Array
from mpipipe.comm.transport.gpu_aware import make_transport
from mpipipe.job import Communicator, Request, Snapshot, group_of, own

ROTATIONS = ("overlap", "sendrecv")
TAG = 1


class RingExchange:
    """Messages of all ranks, on a private duplicate; collective. Texts call it `what`."""

    def __init__(
        self, comm: Communicator, synchronous: bool = False, device: str = "cpu", what: str = "ring"
    ) -> None:
        self.what = what
        self.group = group_of(comm)
        self.transport = make_transport(comm, 1, synchronous, device, self.group)
        # What a message is, the rank at its other end, and its request.
        self.pending: deque[tuple[str, int, Request]] = deque()
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
        message = f"message {self.started} of the {self.what}"
        if incoming is not None:
            text = f"{message} from rank {source} (tag {TAG}, {incoming.nbytes} bytes)"
            request = own(self.transport.irecv(incoming, source, 0, TAG))
            self.pending.append((text, source, request))
        if outgoing is not None:
            request = own(self.transport.isend(outgoing, dest, 0, TAG))
            self.pending.append((f"{message} to be received by {dest}", dest, request))
        if mode == "sendrecv":
            self.finish()

    def poll(self) -> None:
        self.polls += 1
        if not self.transport.progress() and self.pending:
            self.pending[0][2].Test()

    def finish(self) -> None:
        while self.pending:
            message, peer, request = self.pending[0]
            self.group.wait(request, message, peer)
            self.pending.popleft()

    # -- for the report of a hang ------------------------------------------------------------------

    def progress_token(self) -> object:
        return self.started, self.polls, len(self.pending)

    def snapshot(self) -> Snapshot:
        if not self.pending:
            return Snapshot()
        return Snapshot(f"exchange {self.started} of a {self.what}", True, self.thread)

    def close(self) -> None:
        """Free the communicator; collective."""
        self.transport.close()
