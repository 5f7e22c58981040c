"""What every transport can do."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpipipe.arrays import Array, Shape
from mpipipe.comm.types import Communicator, Request


class Transport(Protocol):
    """Starts sends and receives of whole arrays; knows peers, channels and tags.

    Whoever takes a request owns it: see comm.requests, and the mailbox for the many of a step.

    Attributes
    ----------
    channels : list of Communicator
        The private communicators; a message names one by its number.
    """

    channels: list[Communicator]

    def empty(self, shape: Shape, kind: np.dtype) -> Array:
        """A receive buffer in the memory where this rank computes; its content is undefined."""

    def isend(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start sending; the array must stay as it is until the request tests true."""

    def irecv(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start receiving into `array`, which must have the sender's size in bytes."""

    def retire(self, array: Array) -> None:
        """Take note that work queued so far is the last that reads this receive buffer."""

    def begin_call(self, repeated: bool) -> bool:
        """Begin a call; return whether its messages must be started in one order on all ranks.

        `repeated` says, on all ranks alike, that a call like this one has run to its end before.
        """

    def settled(self) -> bool:
        """Whether all that was received is there, and the device waits for no other rank any more."""

    def progress(self) -> bool:
        """Let everything under way advance, if that is this object's business, and say whether it is."""

    def drop_buffers(self) -> None:
        """Free the memory that is kept for later messages."""

    def abort(self) -> None:
        """After a failure: advance no more, and free nothing that MPI or the device may still touch."""

    def close(self) -> None:
        """Free the communicators; collective, and only when nothing is under way."""
