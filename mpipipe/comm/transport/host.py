"""What every transport can do, and messages of host arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Event, Shape
from mpipipe.comm.pieces import ArrayPiece, PieceLine, PieceRequest
from mpipipe.errors import ArgumentError
from mpipipe.job import Advancing, Communicator, Request, communicators, own

MPI_TYPES = "?bBhHiIlLqQfdFD"  # dtype characters that every MPI knows; others travel as bytes
PIECE_BYTES = 1 << 30  # counts above 2^31 - 1 are refused by some MPI libraries
# Of messages that are staged: MPI over shared memory is at its best, and two chunks overlap well.
CHUNK_BYTES = 2 << 20


# Starts to send or receive: (array, peer, tag).
Start: TypeAlias = Callable[[Any, int, int], Request]
Name: TypeAlias = tuple[Start, int, int]  # how on a channel, peer, tag
MakesPiece: TypeAlias = Callable[[PieceRequest, Array], ArrayPiece]


class Transport:
    """Starts sends and receives of whole arrays; knows peers, channels and tags.

    This one is for C-contiguous host arrays. A message names one of the private communicators,
    `channels` duplicates of `comm`, by its number. A longer array than `piece_bytes` travels as
    several messages under one tag, which MPI keeps in order. The code that takes a request owns it:
    see job.requests, and the mailbox for the many of a step.
    """

    piece_bytes = PIECE_BYTES
    takes_devices = False

    def __init__(self, comm: Communicator, channels: int = 1, synchronous: bool = False) -> None:
        self.channels = [communicators.duplicate(comm) for _ in range(channels)]
        self.senders: list[Start] = []
        self.receivers: list[Start] = []
        for channel in self.channels:
            if synchronous:
                self.senders.append(channel.Issend)
            else:
                self.senders.append(channel.Isend)
            self.receivers.append(channel.Irecv)

    def empty(self, shape: Shape, kind: np.dtype) -> Array:
        """A receive buffer in the memory where this rank computes; its content is undefined."""
        return arrays.aligned_empty(shape, kind)

    def receiver(self, channel: int, shape: Shape, kind: np.dtype) -> Start:
        """Return the function of (array, peer, tag) that receives such arrays over a channel."""
        return self._whole(self.receivers[channel], shape, kind)

    def sender(self, channel: int, shape: Shape, kind: np.dtype) -> Start:
        """Return the function of (array, peer, tag) that sends such arrays over a channel."""
        return self._whole(self.senders[channel], shape, kind)

    def _whole(self, operation: Start, shape: Shape, kind: np.dtype) -> Start:
        """Return the operation, or its like for arrays that one call of MPI cannot send."""
        if prod(shape) * kind.itemsize > self.piece_bytes:
            return partial(self._in_pieces, operation)
        if kind.char in MPI_TYPES:
            return operation
        return lambda array, peer, tag: operation(as_bytes(array), peer, tag)

    def _in_pieces(
        self, operation: Start, array: np.ndarray, peer: int, tag: int
    ) -> MessageInPieces:
        line = PieceLine()
        return MessageInPieces(line, line, None, (operation, peer, tag)).begin(
            array, self.piece_bytes
        )

    def isend(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start sending; the array must stay as it is until the request tests true."""
        if arrays.is_device(array) and not self.takes_devices:
            raise ArgumentError(
                "an array on a GPU, from a rank whose stages are on the host",
                found=type(array).__name__,
                expected="numpy.ndarray",
                remedy="give your stage the attribute device = 'cuda'",
            )
        return self.sender(channel, array.shape, array.dtype)(array, peer, tag)

    def irecv(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start receiving into `array`, which must have the sender's size in bytes."""
        return self.receiver(channel, array.shape, array.dtype)(array, peer, tag)

    def close(self) -> None:
        """Free the communicators; collective, and only when nothing is under way."""
        for channel in self.channels:
            channel.Free()
        self.channels = []

    def progress(self) -> bool:
        """Let messages advance, if that is not MPI's business; return whether it is not."""
        return False

    def abort(self) -> None:
        """Advance no more after a failure, and free nothing that is still in use."""


def as_bytes(array: Array) -> Array:
    """See a C-contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


class MessageInPieces(PieceRequest):
    """A request for one array that travels in pieces under one name: how, peer, tag."""

    def __init__(self, owner: Advancing, line: PieceLine, ready: Event | None, name: Name) -> None:
        super().__init__(owner, line, ready)
        self.name = name
        self.requests: list[Request] = []

    def begin(self, array: Array, size: int, kind: MakesPiece = ArrayPiece) -> MessageInPieces:
        """Cut an array into pieces of `size` bytes, at least one, and start what can be started."""
        flat = as_bytes(array)
        for at in range(0, max(1, flat.size), size):
            self.add(kind(self, flat[at : at + size]))
        self.line.advance()
        return self

    def start(self, piece: ArrayPiece) -> Request:
        operation, peer, tag = self.name
        request = own(operation(piece.memory, peer, tag), piece.part)
        self.requests.append(request)
        return request

    def Cancel(self) -> None:
        """Withdraw what can be withdrawn; keep for ever what MPI or the device may still touch."""
        for request in self.requests:
            request.Cancel()
        super().Cancel()  # later messages of the name would be matched with this one


def check_sendable(array: Array) -> None:
    """Raise ArgumentError for what cannot travel.

    mpi4py would send a Fortran-ordered array without a word, and the receiver then hold its
    transpose.
    """
    if not arrays.is_array(array):
        raise ArgumentError(
            "not an array", found=type(array).__name__, expected="numpy.ndarray or cupy.ndarray"
        )
    arrays.refuse_mask(array)
    kind = array.dtype
    if kind.type is np.void or kind.kind in "OSU" or not kind.isnative:
        raise ArgumentError(
            "an array of a dtype that cannot be sent",
            found=f"dtype {kind}",
            expected="a numeric dtype in the byte order of this machine",
            remedy="pass the fields of records as a dict of arrays; "
            "x.astype(x.dtype.newbyteorder('=')) swaps bytes",
        )
    if not array.flags.c_contiguous:
        raise ArgumentError(
            "an array that is not C-contiguous",
            found=f"shape {array.shape}, strides {array.strides}",
            expected="C order",
            remedy="pass numpy.ascontiguousarray(x), or cupy's",
        )
