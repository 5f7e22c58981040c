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
from collections import deque

import numpy as np

from mpipipe import arrays
from mpipipe.comm import runtime
from mpipipe.comm.process import register_progress, unregister_progress
from mpipipe.comm.requests import keep_forever, own
from mpipipe.comm.slots import Slots
from mpipipe.comm.transport import CHUNK_BYTES, PIECE_BYTES, HostTransport, check_sendable, start_all

RING = 8  # chunks in pinned memory and in use, each way, beyond the first one of each message
DEPTH = 3  # chunks of one message at once: one is copied, one is on the wire, one is about to be


class _DeviceTransport(ABC):
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
    def _outgoing(self, array, name, ready) -> _Message:
        """The message that sends `array`, a device array once the event `ready` is done, a host array at once."""

    @abstractmethod
    def _incoming(self, array, name, ready) -> _Message:
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


class _Message(ABC):
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


# -- directly ---------------------------------------------------------------------------------------------------------


class DirectTransport(_DeviceTransport):
    """Messages whose addresses in device memory go to a GPU-aware MPI."""

    def _outgoing(self, array, name, ready):
        return _Deferred(self, self.sends, name, array, ready, self.host.isend, self.host.senders)

    def _incoming(self, array, name, ready):
        return _Deferred(self, self.receives, name, array, ready, self.host.irecv, self.host.receivers)


class _Deferred(_Message):
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
        pieces = _pieces(self.array, self.transport.piece_bytes)
        return start_all(self.operations[channel], pieces, peer, tag, self.array)

    def _withdraw(self):
        if self.request is not None:
            self.request.Cancel()


def _pieces(array, piece_bytes):
    """The memory of a device array, for MPI."""
    MPI = runtime.mpi()
    address, nbytes = arrays.address(array), array.nbytes
    return [
        [MPI.buffer.fromaddress(address + start, min(piece_bytes, nbytes - start)), MPI.BYTE]
        for start in range(0, max(1, nbytes), piece_bytes)
    ]


# -- through the host -------------------------------------------------------------------------------------------------


class StagedTransport(_DeviceTransport):
    """Messages that pass through pinned memory, chunk by chunk: one is copied while the last one is on the wire.

        device  | copy 0 | copy 1 | copy 2 |                 outward stream
        wire             | send 0 | send 1 | send 2 |        host, in `progress`
        device                    | copy 0 | copy 1 | ...    inward stream of the receiver

    Copies are in the order of two streams of their own, which wait on the device for the events of producers and
    consumers; once a receive tests true, the current stream waits for its last copy.

    It cannot deadlock for want of pinned memory. A chunk holds its page until a copy is done, which happens without
    help, or until MPI has sent or received it, which may need the peer to come to its side of this message, and the
    peer may come to that only after other messages, in an order that is not known here. So no message may wait for a
    page that another one holds: the first page of each is granted always (Slots.take), and with one page a message
    goes through, chunk after chunk. Only further pages, which hide the copies, come from a limited ring, and they are
    never waited for. Of messages with one name a later one waits for the earlier one, as it does in MPI.
    """

    piece_bytes = CHUNK_BYTES

    def __init__(self, comm, channels: int = 1, synchronous: bool = False):
        super().__init__(comm, channels, synchronous)
        self.outward, self.inward = arrays.side_stream(), arrays.side_stream()
        self.out_slots, self.in_slots = Slots(RING * self.piece_bytes), Slots(RING * self.piece_bytes)
        self.copied: deque = deque()  # (event, message, page, bytes): on their way out to the host
        self.returned: deque = deque()  # (event, message, page): on their way in to the device

    def _outgoing(self, array, name, ready):
        if ready is None:
            return _Deferred(self, self.sends, name, array, None, self.host.isend, None)
        return _Outgoing(self, self.sends, name, array, ready)

    def _incoming(self, array, name, ready):
        if ready is None:
            return _Deferred(self, self.receives, name, array, None, self.host.irecv, None)
        return _Incoming(self, self.receives, name, array, ready)

    def progress(self) -> bool:
        while self.copied and arrays.is_done(self.copied[0][0]):
            _, message, page, nbytes = self.copied.popleft()
            message.send(page, nbytes)
        while self.returned and arrays.is_done(self.returned[0][0]):
            _, message, page = self.returned.popleft()
            message.held -= 1
            self.in_slots.give(page)
        return super().progress()

    def forget(self):
        super().forget()
        self.out_slots.forget()
        self.in_slots.forget()

    def close(self):
        for event, *_ in self.returned:
            event.synchronize()
        super().close()


class _Staged(_Message):
    """A message in chunks.

    Attributes
    ----------
    next : where the next chunk begins, in bytes
    untaken : chunks that have had no page yet
    held : pages in use
    wire : (MPI request, page, chunk) of each chunk that MPI has, oldest first
    """

    def __init__(self, transport, messages, name, array, ready):
        super().__init__(transport, messages, name, array, ready)
        self.bytes = array.reshape(-1).view(np.uint8)
        self.next, self.held = 0, 0
        self.untaken = -(-max(1, array.nbytes) // transport.piece_bytes)
        self.wire: deque = deque()

    def _next_chunk(self, slots):
        """(page, chunk of the array) where there is a page for it; else None."""
        size = self.transport.piece_bytes
        page = slots.take(min(size, self.array.nbytes), first=self.held == 0) if self.held < DEPTH else None
        if page is None:
            return None
        chunk = self.bytes[self.next : self.next + size]
        self.held += 1
        self.untaken -= 1
        self.next += size
        return page, chunk

    def _withdraw(self):
        for request, *_ in self.wire:
            request.Cancel()


class _Outgoing(_Staged):
    def __init__(self, transport, messages, name, array, ready):
        super().__init__(transport, messages, name, array, ready)
        self.unsent = self.untaken  # chunks that MPI has not had yet

    def advance(self):
        transport = self.transport
        while self.wire and self.wire[0][0].Test():
            transport.out_slots.give(self.wire.popleft()[1])
            self.held -= 1
        while self.untaken:
            start = self.next
            taken = self._next_chunk(transport.out_slots)
            if taken is None:
                break
            page, chunk = taken
            with transport.outward:
                if start == 0:
                    arrays.wait_for(self.ready)
                if chunk.nbytes:
                    arrays.copy_to_host(page[: chunk.nbytes], chunk)
                transport.copied.append((arrays.record(), self, page, chunk.nbytes))
        self.finished = self.posted and self.held == 0

    def send(self, page, nbytes):
        """Hand a chunk to MPI that has arrived on the host; chunks arrive in the order of their copies."""
        peer, channel, tag = self.name
        request = own(self.transport.host.senders[channel](page[:nbytes], peer, tag))
        self.wire.append((request, page))
        self.unsent -= 1
        self.posted = self.unsent == 0


class _Incoming(_Staged):
    def __init__(self, transport, messages, name, array, ready):
        super().__init__(transport, messages, name, array, ready)
        self.arrived = None  # event behind the last copy

    def advance(self):
        transport = self.transport
        peer, channel, tag = self.name
        while self.untaken:
            taken = self._next_chunk(transport.in_slots)
            if taken is None:
                break
            page, chunk = taken
            receive = transport.host.receivers[channel]
            self.wire.append((own(receive(page[: chunk.nbytes], peer, tag)), page, chunk))
            self.posted = self.untaken == 0
        while self.wire and self.wire[0][0].Test():
            _, page, chunk = self.wire.popleft()
            with transport.inward:
                if self.arrived is None:
                    arrays.wait_for(self.ready)
                if chunk.nbytes:
                    arrays.copy_to_device(chunk, page[: chunk.nbytes])
                self.arrived = arrays.record()
            transport.returned.append((self.arrived, self, page))
        self.finished = self.posted and not self.wire

    def Test(self) -> bool:
        """As of any request; once it is true, later work on the current stream finds the data."""
        if not super().Test():
            return False
        arrays.wait_for(self.arrived)
        return True
