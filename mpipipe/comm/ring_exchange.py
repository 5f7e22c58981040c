"""Neighbour exchange around a ring: one message out, one in, while the caller computes.

`overlap` starts a receive and a send, which advance whenever the caller polls. `sendrecv` waits for the same exchange
before the computation. The data are the same either way.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import NamedTuple

from mpipipe.arrays import Array
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.transport.gpu_aware import GpuAwareness
from mpipipe.job import Communicator, Message, Request, Snapshot, group_of, own

ROTATIONS = ("overlap", "sendrecv")
TAG = 1
KEPT = 8  # exchanges that the flight recorder knows


class RingMessages(NamedTuple):
    """One message out and one in: its number since the ring was made, both ends, and what MPI was told."""

    number: int
    dest: int
    source: int
    tag: int
    bytes_out: int
    bytes_in: int
    thread: int

    @property
    def subject(self) -> str:
        return f"message {self.number} of the ring"

    def __str__(self) -> str:
        return f"{self.subject} from rank {self.source} (tag {self.tag}, {self.bytes_in} bytes)"


class RingExchange:
    """Messages between neighbours of a ring, on a private duplicate of its communicator; collective."""

    def __init__(
        self, comm: Communicator, synchronous: bool = False, device: str = "cpu", verdict: GpuAwareness | None = None
    ) -> None:
        self.group = group_of(comm)
        self.transport = make_transport(comm, 1, synchronous, device, verdict, self.group)
        self.pending: list[Request] = []
        self.started = self.polls = 0
        self.last: deque[RingMessages] = deque(maxlen=KEPT)
        self.group.context.add_inspectable(self)

    def start(self, mode: str, outgoing: Array, dest: int, incoming: Array, source: int) -> None:
        """Send one array and receive another (one-dimensional, contiguous); both are in use until `finish`.

        On a device, the send follows all work queued on the current stream so far, and no later work may change the
        outgoing array. Work queued after `finish` finds the received data.
        """
        self.started += 1
        sizes = outgoing.nbytes, incoming.nbytes
        self.last.append(RingMessages(self.started, dest, source, TAG, *sizes, get_ident()))
        self.pending.append(own(self.transport.irecv(incoming, source, 0, TAG)))
        self.pending.append(own(self.transport.isend(outgoing, dest, 0, TAG)))
        if mode == "sendrecv":
            self.finish()

    def poll(self) -> None:
        """Let the exchange under way advance."""
        self.polls += 1
        if not self.transport.progress() and self.pending:
            self.pending[0].Test()

    def finish(self) -> None:
        """Wait for the exchange under way."""
        while self.pending:
            exchange, receives = self.last[-1], len(self.pending) == 2
            what = exchange if receives else f"{exchange.subject} to be received by {exchange.dest}"
            self.group.wait(self.pending[0], what, peer=exchange.source if receives else exchange.dest)
            self.pending.pop(0)

    # -- for the flight recorder --------------------------------------------------------------------------------

    def progress_token(self) -> object:
        """Something that is another thing after every progress."""
        return self.started, self.polls, len(self.pending)

    def snapshot(self) -> Snapshot:
        """The exchange under way, and the last ones."""
        last, pending = tuple(self.last), len(self.pending)
        members = self.group.members
        expects = None
        if pending == 2:
            now = last[-1]
            expects = Message((now.number,), now.subject, members[now.source], (0, now.tag), now.bytes_in)
        return Snapshot(
            self.group.key,
            doing=f"exchange {last[-1].number} of a ring" if pending else "",
            computes=pending > 0,
            stage=None,
            microbatch=None,
            thread=last[-1].thread if last else 0,
            expects=expects,
            sent=tuple(Message((e.number,), e.subject, members[e.dest], (0, e.tag), e.bytes_out) for e in last),
            operations=tuple(f"{e}, and one to rank {e.dest} of {e.bytes_out} bytes" for e in last),
        )

    def close(self) -> None:
        """Free the communicator; collective."""
        self.transport.close()
