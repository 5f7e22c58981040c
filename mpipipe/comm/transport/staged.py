"""Messages of device arrays that pass through pinned host memory, for an MPI that cannot take device memory."""

from __future__ import annotations

from collections import deque

import numpy as np

from mpipipe import arrays
from mpipipe.comm.requests import own
from mpipipe.comm.transport.device import DeferredMessage, DeviceMessage, DeviceTransport
from mpipipe.comm.transport.host import CHUNK_BYTES
from mpipipe.comm.transport.pinned_pool import PinnedPool

RING = 8  # chunks in pinned memory and in use, each way, beyond the first one of each message
DEPTH = 3  # chunks of one message at once: one is copied, one is on the wire, one is about to be


class StagedTransport(DeviceTransport):
    """Messages that pass through pinned memory, chunk by chunk: one is copied while the last one is on the wire.

        device  | copy 0 | copy 1 | copy 2 |                 outward stream
        wire             | send 0 | send 1 | send 2 |        host, in `progress`
        device                    | copy 0 | copy 1 | ...    inward stream of the receiver

    Copies are in the order of two streams of their own, which wait on the device for the events of producers and
    consumers; once a receive tests true, the current stream waits for its last copy.

    It cannot deadlock for want of pinned memory. A chunk holds its page until a copy is done, which happens without
    help, or until MPI has sent or received it, which may need the peer to come to its side of this message, and the
    peer may come to that only after other messages, in an order that is not known here. So no message may wait for a
    page that another one holds: the first page of each is granted always (PinnedPool.take), and with one page a message
    goes through, chunk after chunk. Only further pages, which hide the copies, come from a limited ring, and they are
    never waited for. Of messages with one name a later one waits for the earlier one, as it does in MPI.
    """

    piece_bytes = CHUNK_BYTES

    def __init__(self, comm, channels: int = 1, synchronous: bool = False):
        super().__init__(comm, channels, synchronous)
        self.outward, self.inward = arrays.side_stream(), arrays.side_stream()
        self.out_pool, self.in_pool = PinnedPool(RING * self.piece_bytes), PinnedPool(RING * self.piece_bytes)
        self.copied: deque = deque()  # (event, message, page, bytes): on their way out to the host
        self.returned: deque = deque()  # (event, message, page): on their way in to the device

    def _outgoing(self, array, name, ready):
        if ready is None:
            return DeferredMessage(self, self.sends, name, array, None, self.host.isend, None)
        return _Outgoing(self, self.sends, name, array, ready)

    def _incoming(self, array, name, ready):
        if ready is None:
            return DeferredMessage(self, self.receives, name, array, None, self.host.irecv, None)
        return _Incoming(self, self.receives, name, array, ready)

    def progress(self) -> bool:
        while self.copied and arrays.is_done(self.copied[0][0]):
            _, message, page, nbytes = self.copied.popleft()
            message.send(page, nbytes)
        while self.returned and arrays.is_done(self.returned[0][0]):
            _, message, page = self.returned.popleft()
            message.held -= 1
            self.in_pool.give(page)
        return super().progress()

    def forget(self):
        super().forget()
        self.out_pool.forget()
        self.in_pool.forget()

    def close(self):
        for event, *_ in self.returned:
            event.synchronize()
        super().close()


class _Staged(DeviceMessage):
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

    def _next_chunk(self, pool):
        """(page, chunk of the array) where there is a page for it; else None."""
        size = self.transport.piece_bytes
        page = pool.take(min(size, self.array.nbytes), first=self.held == 0) if self.held < DEPTH else None
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
            transport.out_pool.give(self.wire.popleft()[1])
            self.held -= 1
        while self.untaken:
            start = self.next
            taken = self._next_chunk(transport.out_pool)
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
            taken = self._next_chunk(transport.in_pool)
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
