"""Messages of host arrays."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.comm import communicators
from mpipipe.comm.transport.request_group import start_all
from mpipipe.comm.types import Communicator, Request
from mpipipe.errors import ArgumentError

MPI_TYPES = "?bBhHiIlLqQfdFD"  # dtype characters that every MPI knows; others travel as bytes
PIECE_BYTES = 1 << 30  # counts above 2^31 - 1 are refused by some MPI libraries
CHUNK_BYTES = 2 << 20  # where a rank stages: MPI over shared memory is at its best, and two chunks overlap well


class HostTransport:
    """Non-blocking messages of C-contiguous host arrays.

    Parameters
    ----------
    comm : Communicator
        To duplicate; the duplicates are private to this object.
    channels : int
        How many duplicates the tags need.
    synchronous : bool
        Whether to use synchronous sends (Issend).
    piece_bytes : int
        A longer array travels as several messages under one tag, which MPI keeps in order.
    typed : bool
        Whether to send what MPI has a type for as such; False if a peer sends all as bytes.
    """

    def __init__(
        self,
        comm: Communicator,
        channels: int = 1,
        synchronous: bool = False,
        piece_bytes: int = PIECE_BYTES,
        typed: bool = True,
    ) -> None:
        self.channels = [communicators.duplicate(comm) for _ in range(channels)]
        self.senders = [channel.Issend if synchronous else channel.Isend for channel in self.channels]
        self.receivers = [channel.Irecv for channel in self.channels]
        self.piece_bytes = piece_bytes
        self.types = MPI_TYPES if typed else ""

    def empty(self, shape: Shape, kind: np.dtype) -> np.ndarray:
        """A receive buffer; its content is undefined."""
        return arrays.aligned_empty(shape, kind)

    def retire(self, array: Array) -> None:
        """On the host no work is queued: what was to be read has been read."""

    def begin_call(self, repeated: bool) -> bool:
        """False: messages start in any order."""
        return False

    def settled(self) -> bool:
        """True: a receive tests true once its data are there."""
        return True

    def progress(self) -> bool:
        """False: MPI lets all messages advance whenever it is called, with a test of any request for example."""
        return False

    def drop_buffers(self) -> None:
        """Nothing is kept between messages."""

    def abort(self) -> None:
        """After a failure: requests under way are the business of their owners."""

    def isend(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start sending; the array must stay as it is until the request tests true."""
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                "an array on a GPU, from a rank whose stages are on the host",
                found=type(array).__name__,
                expected="numpy.ndarray",
                remedy="give your stage the attribute device = 'cuda'",
            )
        if array.nbytes <= self.piece_bytes and array.dtype.char in self.types:
            return self.senders[channel](array, peer, tag)
        return start_all(self.senders[channel], self._pieces(array), peer, tag)

    def irecv(self, array: np.ndarray, peer: int, channel: int, tag: int) -> Request:
        """Start receiving into `array`, which must have the sender's size in bytes."""
        if array.nbytes <= self.piece_bytes and array.dtype.char in self.types:
            return self.receivers[channel](array, peer, tag)
        return start_all(self.receivers[channel], self._pieces(array), peer, tag)

    def _pieces(self, array: np.ndarray) -> list[np.ndarray]:
        flat = array.reshape(-1).view(np.uint8)
        return [flat[start : start + self.piece_bytes] for start in range(0, max(1, flat.size), self.piece_bytes)]

    def close(self) -> None:
        """Free the communicators; collective."""
        for channel in self.channels:
            channel.Free()
        self.channels, self.senders, self.receivers = [], [], []
