"""Messages of device arrays: handed to a GPU-aware MPI, or through pinned host memory where MPI cannot take them.

MPI knows no streams. Two rules keep it and the kernels apart, and the host waits for neither:

- what a message says must be there before it is sent: a send starts when the event is done that was recorded behind
  all work of the current stream at `isend`, the kernel that makes the array included;
- what a buffer held must be read before it is overwritten: a receive starts when the event is done that was recorded
  at `retire(array)`, behind the last work that reads it; or at `irecv`, for arrays that were never retired. A new
  array needs this as much as an old one: CuPy hands out memory that earlier work on the stream may still use.

Messages with one name (peer, channel, tag) must meet MPI in the order of the calls at both ends, whichever event is
done first. What is ready is started by `progress`, which every wait of this thread calls (`register_progress`), since
the message that a peer waits for may be one that is still held back here.

Host arrays, headers for example, go along with the others, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mpipipe import arrays
from mpipipe.comm import runtime
from mpipipe.comm.process import register_progress, unregister_progress
from mpipipe.comm.requests import keep_forever, own
from mpipipe.comm.transport.host import PIECE_BYTES, HostTransport
from mpipipe.comm.transport.request_group import start_all
from mpipipe.comm.transport.sendable import check_sendable


class DeviceTransport(ABC):
    """What both kinds have in common.

    Parameters
    ----------
    comm, channels, synchronous : as for HostTransport
    """

    piece_bytes = PIECE_BYTES

    def __init__(self, comm, channels: int = 1, synchronous: bool = False):
        self.host = HostTransport(comm, channels, synchronous, self.piece_bytes, typed=False)
        self.channels = self.host.channels
        self.sends: list = []  # messages under way, in the order of the calls
        self.receives: list = []
        self.retired: dict = {}  # id -> (event, array): the array is held so that its id stays its own
        register_progress(self)

    def empty(self, shape, kind):
        """A receive buffer on the device; its content is undefined."""
        return arrays.empty(shape, kind, "cuda")

    def retire(self, array):
        """The work queued so far on the current stream is the last that reads this receive buffer."""
        if arrays.is_device(array):
            self.retired[id(array)] = arrays.record(), array

    def isend(self, array, peer: int, channel: int, tag: int):
        """Start sending; the array must stay as it is until the request tests true."""
        check_sendable(array)
        ready = arrays.record() if arrays.is_device(array) else None
        return self._begin(self.sends, self._outgoing(array, (peer, channel, tag), ready))

    def irecv(self, array, peer: int, channel: int, tag: int):
        """Start receiving into `array`, which must have the sender's size in bytes."""
        check_sendable(array)
        ready = None
        if arrays.is_device(array):
            ready = self.retired.pop(id(array))[0] if id(array) in self.retired else arrays.record()
        return self._begin(self.receives, self._incoming(array, (peer, channel, tag), ready))

    @abstractmethod
    def _outgoing(self, array, name, ready) -> DeviceMessage:
        """The message that sends `array`, a device array once the event `ready` is done, a host array at once."""

    @abstractmethod
    def _incoming(self, array, name, ready) -> DeviceMessage:
        """The same for one that is received."""

    def _begin(self, messages, message):
        register_progress(self)  # for the thread that uses it now
        messages.append(message)
        _advance(messages)
        return message

    def progress(self) -> bool:
        """Let everything under way advance; never waits."""
        if self.sends:
            _advance(self.sends)
        if self.receives:
            _advance(self.receives)
        return True

    def forget(self):
        """Drop what is kept for buffers that will not be used again."""
        self.retired.clear()

    def abandon(self):
        """Advance no more after a failure, and free nothing that MPI or the device may still touch."""
        unregister_progress(self)
        keep_forever(self)

    def close(self):
        """Free the communicators; collective, and only when nothing is under way."""
        unregister_progress(self)
        self.forget()
        self.host.close()
        self.channels = []


def _advance(messages):
    """Let messages take their next steps; of those with one name, a later one waits until an earlier one is posted."""
    waiting = set()
    for message in messages:
        if message.name not in waiting:
            message.advance()
            if not message.posted:
                waiting.add(message.name)
    messages[:] = [message for message in messages if not message.finished]


class DeviceMessage(ABC):
    """A request.

    Attributes
    ----------
    posted : all of it has been handed on, in its order, so that a message of the same name may follow
    finished : nothing is left to do
    """

    def __init__(self, transport, messages, name, array, ready):
        self.transport, self.messages, self.name, self.array, self.ready = transport, messages, name, array, ready
        self.posted = self.finished = False

    @abstractmethod
    def advance(self):
        """Take the next steps, if any can be taken; never waits."""

    @abstractmethod
    def _withdraw(self):
        """Cancel what MPI has of it."""

    def Test(self) -> bool:
        if not self.finished:
            self.transport.progress()
        return self.finished

    def Cancel(self):
        """Withdraw what can be; what MPI or the device may still touch is kept for ever."""
        keep_forever((self, self.transport))
        if self in self.messages:
            self.messages.remove(self)
        self._withdraw()


class DeferredMessage(DeviceMessage):
    """A message that MPI gets as a whole, once an event is done."""

    def __init__(self, transport, messages, name, array, ready, take_host, operations):
        super().__init__(transport, messages, name, array, ready)
        self.take_host, self.operations, self.request = take_host, operations, None

    def advance(self):
        if self.request is None:
            if self.ready is not None and not arrays.is_done(self.ready):
                return
            self.request, self.posted = self._start(), True
        self.finished = self.request.Test()

    def _start(self):
        peer, channel, tag = self.name
        if self.ready is None:
            return own(self.take_host(self.array, peer, channel, tag))
        pieces = device_pieces(self.array, self.transport.piece_bytes)
        return start_all(self.operations[channel], pieces, peer, tag, self.array)

    def _withdraw(self):
        if self.request is not None:
            self.request.Cancel()


def device_pieces(array, piece_bytes):
    """The memory of a device array, for MPI."""
    MPI = runtime.mpi()
    address, nbytes = arrays.address(array), array.nbytes
    return [
        [MPI.buffer.fromaddress(address + start, min(piece_bytes, nbytes - start)), MPI.BYTE]
        for start in range(0, max(1, nbytes), piece_bytes)
    ]
