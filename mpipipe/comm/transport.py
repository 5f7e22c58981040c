"""How the bytes of an array reach another rank.

A transport starts sends and receives of whole arrays and hands back requests with one method, `Test()`. It knows
peers, channels and tags; what a message means is the mailbox's business. This one takes host arrays; a transport for
device arrays has the same two methods.
"""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ArgumentError

MPI_TYPES = "?bBhHiIlLqQfdFD"  # dtype characters that every MPI knows; others travel as bytes
PIECE_BYTES = 1 << 30  # counts above 2^31 - 1 are refused by some MPI libraries


class HostTransport:
    """Non-blocking messages of C-contiguous host arrays.

    Parameters
    ----------
    comm : communicator to duplicate; the duplicates are private to this object
    channels : how many duplicates the tags need
    synchronous : use synchronous sends (Issend)
    piece_bytes : a longer array travels as several messages under one tag, which MPI keeps in order
    """

    def __init__(self, comm, channels: int = 1, synchronous: bool = False, piece_bytes: int = PIECE_BYTES):
        self.channels = [comm.Dup() for _ in range(channels)]
        self.senders = [channel.Issend if synchronous else channel.Isend for channel in self.channels]
        self.receivers = [channel.Irecv for channel in self.channels]
        self.piece_bytes = piece_bytes

    def isend(self, array, peer: int, channel: int, tag: int):
        """Start sending; the array must stay as it is until the request tests true."""
        if array.nbytes <= self.piece_bytes and array.dtype.char in MPI_TYPES:
            return self.senders[channel](array, peer, tag)
        return _start(self.senders[channel], self._pieces(array), peer, tag)

    def irecv(self, array, peer: int, channel: int, tag: int):
        """Start receiving into `array`, which must have the sender's size in bytes."""
        if array.nbytes <= self.piece_bytes and array.dtype.char in MPI_TYPES:
            return self.receivers[channel](array, peer, tag)
        return _start(self.receivers[channel], self._pieces(array), peer, tag)

    def _pieces(self, array):
        flat = array.reshape(-1).view(np.uint8)
        return [flat[start : start + self.piece_bytes] for start in range(0, max(1, flat.size), self.piece_bytes)]

    def close(self):
        """Free the communicators; collective."""
        for channel in self.channels:
            channel.Free()
        self.channels, self.senders, self.receivers = [], [], []


def check_sendable(array):
    """Raise ArgumentError for what cannot travel: other types, object arrays, and arrays that are not C-contiguous.

    mpi4py sends a Fortran-ordered array without a word, and the receiver then holds its transpose.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError("not an array", found=type(array).__name__, expected="numpy.ndarray")
    if array.dtype.hasobject:
        raise ArgumentError("an object array", found=f"dtype {array.dtype}", expected="a numeric dtype")
    if not array.dtype.isnative:
        raise ArgumentError(
            "an array in the byte order of another machine", found=f"dtype {array.dtype}", expected="native byte order",
            remedy="pass x.astype(x.dtype.newbyteorder('='))",
        )
    if not array.flags.c_contiguous:
        raise ArgumentError(
            "an array that is not C-contiguous",
            found=f"shape {array.shape}, strides {array.strides}",
            expected="C order",
            remedy="pass numpy.ascontiguousarray(x)",
        )


class _Together:
    """Several requests as one."""

    def __init__(self, requests):
        self.requests = requests

    def Test(self):
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        return not self.requests

    def Cancel(self):
        for request in self.requests:
            request.Cancel()


def _start(operation, pieces, peer, tag):
    requests = [operation(piece, peer, tag) for piece in pieces]
    return requests[0] if len(requests) == 1 else _Together(requests)
