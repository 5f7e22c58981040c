"""Neighbour exchange around a ring: one message out, one in, while the caller computes.

`overlap` starts a receive and a send, and lets them advance whenever the caller polls; `sendrecv` waits for the same
exchange before the computation. The data are the same either way.
"""

from __future__ import annotations

from mpipipe.comm.group import group_of
from mpipipe.comm.requests import own
from mpipipe.comm.transport.choose import make_transport

ROTATIONS = ("overlap", "sendrecv")
TAG = 1


class RingExchange:
    """What the ranks of one communicator need to be a ring, on a private duplicate of it.

    Parameters
    ----------
    comm : the ring
    synchronous : use synchronous sends
    device : "cpu" or "cuda", where the arrays of this rank lie
    verdict : as for make_transport

    Attributes
    ----------
    group : comm.group.Group of the ring
    comm : a private duplicate
    calls : collective calls begun on it, counted by its users
    plans : what its users have worked out for it and keep
    """

    def __init__(self, comm, synchronous: bool = False, device: str = "cpu", verdict=None):
        self.group = group_of(comm)
        self.transport = make_transport(comm, 1, synchronous, device, verdict, self.group)
        self.comm = self.transport.channels[0]
        self.pending: list = []
        self.calls = 0
        self.plans: dict = {}

    def start(self, mode: str, outgoing, dest: int, incoming, source: int):
        """Send one array and receive another (one-dimensional, contiguous); both are in use until `finish`.

        On a device, work queued so far on the current stream makes the one and is the last to read the other; work
        queued after `finish` finds the data.
        """
        self.pending.append(own(self.transport.irecv(incoming, source, 0, TAG)))
        self.pending.append(own(self.transport.isend(outgoing, dest, 0, TAG)))
        if mode == "sendrecv":
            self.finish()

    def poll(self):
        """Let the exchange under way advance."""
        if not self.transport.progress() and self.pending:
            self.pending[0].Test()

    def finish(self):
        """Wait for the exchange under way."""
        while self.pending:
            self.group.wait(self.pending[0], "a neighbour in the ring")
            self.pending.pop(0)

    def close(self):
        """Free the communicator; collective."""
        self.transport.close()
