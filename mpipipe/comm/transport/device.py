"""Messages of device arrays: handed to a GPU-aware MPI, or through pinned host memory.

MPI knows no streams. Two rules keep it and the kernels apart, and the host waits for neither:

- An array must be complete before it is sent. `isend` records an event after all work of the
  current stream, the kernel that makes the array included; the send starts once that event is done.
- A buffer must be read before it is overwritten. `retire(array)` records an event after the last
  work that reads the buffer, and `irecv` does so for an array that was never retired; the receive
  starts once that event is done. A new array needs this as much as an old one: CuPy hands out
  memory that earlier work on the stream may still use.

Messages with one name (peer, channel, tag) must meet MPI in the order of the calls at both ends,
whichever event is done first. `progress` starts the messages that are ready. Every wait of this
thread calls it (`register_progress`): the peer may be waiting for a message that is still held back
here.

Host arrays, headers for example, go along with the others, in the same order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Event, Shape
from mpipipe.comm.transport.host import (
    PIECE_BYTES,
    HostTransport,
    Start,
    Transport,
    check_sendable,
    in_pieces,
)
from mpipipe.job import (
    Buffer,
    Communicator,
    Request,
    keep_forever,
    own,
    register_progress,
    runtime,
    unregister_progress,
)

Name: TypeAlias = tuple[Start, int, int]  # how it is sent or received on a channel, peer, tag
MakesPiece: TypeAlias = "Callable[[DeviceMessage, Array], Piece]"


class DeviceTransport(Transport):
    """Messages whose addresses in device memory go to a GPU-aware MPI, in pieces.

    All messages of one name stand in one line, piece by piece, in the order of the calls.
    """

    piece_bytes = PIECE_BYTES
    depth: int | None = None  # pieces of one line that are under way at once; None: all
    retires = True

    def __init__(self, comm: Communicator, channels: int = 1, synchronous: bool = False) -> None:
        self.host = HostTransport(comm, channels, synchronous, self.piece_bytes)
        self.channels = self.host.channels
        # The classes of the pieces of device arrays.
        self.outgoing: MakesPiece = DevicePiece
        self.incoming: MakesPiece = DevicePiece
        self.lines: dict[Name, deque[Piece]] = defaultdict(deque)
        # id -> (event, array); the array is held so that its id stays its own
        self.retired: dict[int, tuple[Event, DeviceArray]] = {}
        register_progress(self)

    def empty(self, shape: Shape, kind: np.dtype) -> DeviceArray:
        return arrays.empty(shape, kind, "cuda")

    def retire(self, array: Array) -> None:
        if arrays.is_device(array):
            self.retired[id(array)] = arrays.record(), array

    def receiver(self, channel: int, shape: Shape, kind: np.dtype) -> Start:
        return partial(self._begin, self.host.receivers[channel], self.incoming)

    def sender(self, channel: int, shape: Shape, kind: np.dtype) -> Start:
        return partial(self._begin, self.host.senders[channel], self.outgoing)

    def _begin(
        self, operation: Start, kind: MakesPiece, array: Array, peer: int, tag: int
    ) -> DeviceMessage:
        check_sendable(array)
        register_progress(self)  # for the thread that uses it now
        ready = None
        if not arrays.is_device(array):
            kind = Piece
        elif operation in self.host.receivers and id(array) in self.retired:
            ready, _ = self.retired.pop(id(array))
        else:
            ready = arrays.record()
        line = self.lines[operation, peer, tag]
        message = DeviceMessage(self, line, operation, peer, tag, ready)
        for part in in_pieces(array, self.piece_bytes):
            line.append(kind(message, part))
            message.left += 1
        self._advance(line)
        return message

    def _advance(self, line: deque[Piece]) -> None:
        """Let pieces advance; MPI gets them in their order."""
        has_all = True
        for piece in islice(line, self.depth):
            if not piece.prepare(is_first=piece is line[0]):
                break
            has_all = has_all and piece.post()
        while line and line[0].request is not None and line[0].request.Test():
            line.popleft().finish()

    def progress(self) -> bool:
        for name, line in tuple(self.lines.items()):
            self._advance(line)
            if not line:
                del self.lines[name]
        return True

    def drop_buffers(self) -> None:
        self.retired.clear()

    def abort(self) -> None:
        unregister_progress(self)
        keep_forever(self)

    def close(self) -> None:
        unregister_progress(self)
        self.drop_buffers()
        self.host.close()
        self.channels = []


@dataclass(eq=False, repr=False)
class DeviceMessage:
    """A request for one array, whose pieces a transport has in `line`.

    `ready` is what must be done before MPI may touch the array; None for a host array.
    """

    transport: DeviceTransport
    line: deque[Piece]
    operation: Start
    peer: int
    tag: int
    ready: Event | None
    left: int = 0  # pieces that are not complete
    arrived: Event | None = None  # after the last copy from the host

    def Test(self) -> bool:
        """Whether nothing is left to do; then later work on the current stream finds the data.

        Everything of the transport advances.
        """
        if self.left:
            self.transport.progress()
        if self.left:
            return False
        if self.arrived is not None:
            arrays.wait_for(self.arrived)
        return True

    def Cancel(self) -> None:
        """Withdraw what can be withdrawn; keep for ever what MPI or the device may still touch."""
        keep_forever((self.transport, tuple(self.line)))
        for piece in self.line:
            if piece.message is self and piece.request is not None:
                piece.request.Cancel()
        self.line.clear()  # what MPI would match with later messages of the name is not sent


class Piece:
    """A part of an array, as bytes, which goes to MPI once an event is done."""

    request: Request | None = None  # MPI's, which has the piece from then on

    def __init__(self, message: DeviceMessage, part: Array) -> None:
        self.message = message
        self.part = part
        self.memory: Buffer = part  # what MPI gets

    def prepare(self, is_first: bool) -> bool:
        """Do what comes before MPI, but for waiting; False where all later ones must wait."""
        ready = self.message.ready
        return self.request is not None or ready is None or arrays.is_done(ready)

    def post(self) -> bool:
        """Let MPI have the piece, if it may; return whether it has."""
        if self.request is None:
            message = self.message
            self.request = own(message.operation(self.memory, message.peer, message.tag), self.part)
        return True

    def finish(self) -> None:
        """Do what comes after MPI."""
        self.message.left -= 1


class DevicePiece(Piece):
    """A part of a device array, whose address MPI gets."""

    def __init__(self, message: DeviceMessage, part: DeviceArray) -> None:
        super().__init__(message, part)
        MPI = runtime.mpi()
        self.memory = [MPI.buffer.fromaddress(arrays.address(part), part.nbytes), MPI.BYTE]
