"""Messages of device arrays: handed to a GPU-aware MPI, or through pinned host memory.

MPI knows no streams. Two rules keep it and the kernels apart, and the host waits for neither:

- An array must be complete before it is sent. `isend` records an event after all work of the
  current stream, the kernel that makes the array included; the send starts once that event is done.
- A buffer must be read before it is overwritten. `irecv` records an event, too, and the receive
  starts once that event is done. A new array needs this as much as an old one: CuPy hands out
  memory that earlier work on the stream may still use.

Messages with one name (peer, channel, tag) must meet MPI in the order of the calls at both ends,
whichever event is done first. `progress` starts the messages that are ready. Every wait of this
thread calls it (`register_progress`): the peer may be waiting for a message that is still held back
here.

Host arrays, headers for example, go along with the others, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Shape
from mpipipe.comm.pieces import ArrayPiece, PieceLine, PieceRequest
from mpipipe.comm.transport.host import (
    MakesPiece,
    MessageInPieces,
    Name,
    Start,
    Transport,
    check_sendable,
)
from mpipipe.job import Communicator, keep_forever, register_progress, runtime, unregister_progress


class DeviceTransport(Transport):
    """Messages whose addresses in device memory go to a GPU-aware MPI, in pieces.

    All messages of one name stand in one line, piece by piece, in the order of the calls.
    """

    takes_devices = True
    depth = 1 << 30  # pieces of one line that are under way at once

    def __init__(self, comm: Communicator, channels: int = 1, synchronous: bool = False) -> None:
        super().__init__(comm, channels, synchronous)
        # The classes of the pieces of device arrays.
        self.outgoing: MakesPiece = DevicePiece
        self.incoming: MakesPiece = DevicePiece
        self.lines: dict[Name, PieceLine] = defaultdict(lambda: PieceLine(self.depth))
        register_progress(self)

    def empty(self, shape: Shape, kind: np.dtype) -> DeviceArray:
        return arrays.empty(shape, kind, "cuda")

    def _whole(self, operation: Start, shape: Shape, kind: np.dtype) -> Start:
        return partial(self._begin, operation)

    def _begin(self, operation: Start, array: Array, peer: int, tag: int) -> MessageInPieces:
        check_sendable(array)
        register_progress(self)  # for the thread that uses it now
        ready = None
        make: MakesPiece = ArrayPiece
        if arrays.is_device(array):
            ready = arrays.record()
            make = self.outgoing
            if operation in self.receivers:
                make = self.incoming
        name = operation, peer, tag
        return MessageInPieces(self, self.lines[name], ready, name).begin(
            array, self.piece_bytes, make
        )

    def progress(self) -> bool:
        for name, line in tuple(self.lines.items()):
            line.advance()
            if line.is_empty:
                del self.lines[name]
        return True

    def abort(self) -> None:
        unregister_progress(self)
        keep_forever(self)

    def close(self) -> None:
        unregister_progress(self)
        super().close()


class DevicePiece(ArrayPiece):
    """A part of a device array, whose address MPI gets."""

    def __init__(self, whole: PieceRequest, part: DeviceArray) -> None:
        super().__init__(whole, part)
        MPI = runtime.mpi()
        self.memory = [MPI.buffer.fromaddress(arrays.address(part), part.nbytes), MPI.BYTE]
