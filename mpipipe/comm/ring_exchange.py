"""Neighbour exchange around a ring: one message out, one in, while the caller computes.

`overlap` starts a receive and a send, which advance whenever the caller polls. `sendrecv` waits for the same exchange
before the computation. The data are the same either way.
"""

from __future__ import annotations

from mpipipe.arrays import Array
from mpipipe.comm.group import group_of
from mpipipe.comm.requests import own
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.transport.gpu_aware import Verdict
from mpipipe.comm.types import Communicator, Request

ROTATIONS = ("overlap", "sendrecv")
TAG = 1


class RingExchange:
    """Messages between neighbours of a ring, on a private duplicate of its communicator.

    Parameters
    ----------
    comm : the ranks of the ring; the constructor is collective over it
    synchronous : use synchronous sends
    device : "cpu" or "cuda", where the arrays of this rank lie
    verdict : as for make_transport

    Attributes
    ----------
    group : the comm.group.Group of the ring
    """

    def __init__(
        self, comm: Communicator, synchronous: bool = False, device: str = "cpu", verdict: Verdict | None = None
    ) -> None:
        self.group = group_of(comm)
        self.transport = make_transport(comm, 1, synchronous, device, verdict, self.group)
        self.pending: list[Request] = []

    def start(self, mode: str, outgoing: Array, dest: int, incoming: Array, source: int) -> None:
        """Send one array and receive another (one-dimensional, contiguous); both are in use until `finish`.

        On a device, the send follows all work queued on the current stream so far, and no later work may change the
        outgoing array. Work queued after `finish` finds the received data.
        """
        self.pending.append(own(self.transport.irecv(incoming, source, 0, TAG)))
        self.pending.append(own(self.transport.isend(outgoing, dest, 0, TAG)))
        if mode == "sendrecv":
            self.finish()

    def poll(self) -> None:
        """Let the exchange under way advance."""
        if not self.transport.progress() and self.pending:
            self.pending[0].Test()

    def finish(self) -> None:
        """Wait for the exchange under way."""
        while self.pending:
            self.group.wait(self.pending[0], "a neighbour in the ring")
            self.pending.pop(0)

    def close(self) -> None:
        """Free the communicator; collective."""
        self.transport.close()
