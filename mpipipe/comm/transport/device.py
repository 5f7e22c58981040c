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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Event, Shape
from mpipipe.comm.transport.host import (
    PIECE_BYTES,
    HostTransport,
    Transport,
    check_sendable,
    start_all,
)
from mpipipe.job import (
    Communicator,
    Request,
    keep_forever,
    own,
    register_progress,
    runtime,
    unregister_progress,
)

Name: TypeAlias = tuple[int, int, int]  # peer, channel, tag


class DeviceTransport(Transport):
    """Messages whose addresses in device memory go to a GPU-aware MPI.

    Those of device arrays are of the classes `outgoing` and `incoming`, which start once the event
    `ready` is done.
    """

    piece_bytes = PIECE_BYTES

    retires = True

    def __init__(self, comm: Communicator, channels: int = 1, synchronous: bool = False) -> None:
        self.host = HostTransport(comm, channels, synchronous, self.piece_bytes)
        self.channels = self.host.channels
        self.outgoing: type[DeviceMessage] = WholeMessage
        self.incoming: type[DeviceMessage] = WholeMessage
        self.sends: list[DeviceMessage] = []  # messages under way, in the order of the calls
        self.receives: list[DeviceMessage] = []
        # id -> (event, array); the array is held so that its id stays its own
        self.retired: dict[int, tuple[Event, DeviceArray]] = {}
        register_progress(self)

    def empty(self, shape: Shape, kind: np.dtype) -> DeviceArray:
        return arrays.empty(shape, kind, "cuda")

    def retire(self, array: Array) -> None:
        if arrays.is_device(array):
            self.retired[id(array)] = arrays.record(), array

    def isend(self, array: Array, peer: int, channel: int, tag: int) -> DeviceMessage:
        return self._begin(self.sends, self.outgoing, (peer, channel, tag), array)

    def irecv(self, array: Array, peer: int, channel: int, tag: int) -> DeviceMessage:
        return self._begin(self.receives, self.incoming, (peer, channel, tag), array)

    def _begin(
        self, messages: list[DeviceMessage], kind: type[DeviceMessage], name: Name, array: Array
    ) -> DeviceMessage:
        check_sendable(array)
        register_progress(self)  # for the thread that uses it now
        ready = None
        if not arrays.is_device(array):
            kind = WholeMessage
        elif messages is self.receives and id(array) in self.retired:
            ready, _ = self.retired.pop(id(array))
        else:
            ready = arrays.record()
        message = kind(self, messages, name, array, ready)
        messages.append(message)
        _advance(messages)
        return message

    def progress(self) -> bool:
        if self.sends:
            _advance(self.sends)
        if self.receives:
            _advance(self.receives)
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


def _advance(messages: list[DeviceMessage]) -> None:
    """Let messages advance; of those with one name, a later one waits for the earlier."""
    waiting: set[Name] = set()
    for message in messages:
        if message.name not in waiting:
            message.advance()
            if not message.posted:
                waiting.add(message.name)
    messages[:] = [message for message in messages if not message.finished]


@dataclass(eq=False, repr=False)
class DeviceMessage(ABC):
    """A request for one array, which a transport advances and has in one of its lists, `messages`.

    `ready` is what must be done before MPI may touch the array; None for a host array.
    """

    transport: DeviceTransport
    messages: list[DeviceMessage]
    name: Name
    array: Array
    ready: Event | None
    # All of it is handed to MPI: a message of the same name may follow.
    posted: bool = False
    finished: bool = False

    @abstractmethod
    def advance(self) -> None:
        """Take the next steps, if any can be taken; never waits."""

    @abstractmethod
    def _withdraw(self) -> None:
        """Cancel the requests of MPI that belong to it."""

    def Test(self) -> bool:
        """Whether nothing is left to do; lets everything of the transport advance."""
        if not self.finished:
            self.transport.progress()
        return self.finished

    def Cancel(self) -> None:
        """Withdraw what can be withdrawn; keep for ever what MPI or the device may still touch."""
        keep_forever((self, self.transport))
        if self in self.messages:
            self.messages.remove(self)
        self._withdraw()


class WholeMessage(DeviceMessage):
    """A message that MPI gets as a whole, once an event is done."""

    request: Request | None = None

    def advance(self) -> None:
        if self.request is None:
            if self.ready is not None and not arrays.is_done(self.ready):
                return
            self.request = self._start()
            self.posted = True
        self.finished = self.request.Test()

    def _start(self) -> Request:
        host = self.transport.host
        peer, channel, tag = self.name
        start = host.irecv
        operations = host.receivers
        if self.messages is self.transport.sends:
            start = host.isend
            operations = host.senders
        if self.ready is None:
            return own(start(self.array, peer, channel, tag))
        pieces = device_pieces(self.array, self.transport.piece_bytes)
        return start_all(operations[channel], pieces, peer, tag, self.array)

    def _withdraw(self) -> None:
        if self.request is not None:
            self.request.Cancel()


def device_pieces(array: DeviceArray, piece_bytes: int) -> list[list[object]]:
    """Return a device array as [memory, type] for MPI, in pieces of `piece_bytes`."""
    MPI = runtime.mpi()
    address = arrays.address(array)
    nbytes = array.nbytes
    pieces = []
    for start in range(0, max(1, nbytes), piece_bytes):
        size = min(piece_bytes, nbytes - start)
        pieces.append([MPI.buffer.fromaddress(address + start, size), MPI.BYTE])
    return pieces
