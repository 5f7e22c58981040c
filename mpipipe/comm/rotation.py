"""Neighbour exchange around a ring: one message out, one in, while the caller computes.

`overlap` starts a receive and a send, and lets them advance whenever the caller polls; `sendrecv` does the same
exchange in one blocking call before the computation. The data are the same either way.
"""

from __future__ import annotations

from mpipipe.comm.alarm import wait
from mpipipe.comm.transport import HostTransport
from mpipipe.errors import ArgumentError

ROTATIONS = ("overlap", "sendrecv")
TAG = 1


class Rotation:
    """Exchanges on a private duplicate of `comm`.

    Parameters
    ----------
    comm : the ring
    mode : "overlap" or "sendrecv"
    synchronous : overlap with synchronous sends

    Attributes
    ----------
    bytes_sent : since the object was made
    """

    def __init__(self, comm, mode: str, synchronous: bool = False):
        if mode not in ROTATIONS:
            raise ArgumentError("unknown rotation", found=repr(mode), expected=" or ".join(ROTATIONS))
        self.transport = HostTransport(comm, synchronous=synchronous)
        self.channel, self.mode = self.transport.channels[0], mode
        self.pending: list = []
        self.bytes_sent = 0

    def start(self, outgoing, dest: int, incoming, source: int):
        """Send one array and receive another (one-dimensional, contiguous); both are in use until `finish`."""
        self.bytes_sent += outgoing.nbytes
        if self.mode == "sendrecv":
            self.channel.Sendrecv(outgoing, dest, TAG, incoming, source, TAG)
            return
        self.pending.append(self.transport.irecv(incoming, source, 0, TAG))
        self.pending.append(self.transport.isend(outgoing, dest, 0, TAG))

    def poll(self):
        """Let the exchange under way advance."""
        if self.pending:
            self.pending[0].Test()

    def finish(self):
        """Wait for the exchange under way."""
        while self.pending:
            wait(self.pending[0])
            self.pending.pop(0)

    def close(self):
        """Free the communicator; collective."""
        self.transport.close()
