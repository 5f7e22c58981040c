"""Messages of device arrays through pinned host memory, for an MPI that needs that."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray, Event
from mpipipe.comm.transport.device import DeviceMessage, DeviceTransport
from mpipipe.comm.transport.host import CHUNK_BYTES
from mpipipe.job import Communicator, Request, own

RING = 8  # chunks in pinned memory and in use, each way, beyond the first one of each message
DEPTH = 3  # chunks of one message at once: one is copied, one is on the wire, one is about to be


class StagedTransport(DeviceTransport):
    """Messages in chunks through pinned memory: one is copied while another is on the wire.

        device  | copy 0 | copy 1 | copy 2 |                 outward stream
        wire             | send 0 | send 1 | send 2 |        host, in `progress`
        device                    | copy 0 | copy 1 | ...    inward stream of the receiver

    Copies are in the order of two streams of their own, which wait on the device for the events of
    producers and consumers; once a receive tests true, the current stream waits for its last copy.

    It cannot deadlock for want of pinned memory. A chunk holds its buffer until a copy is done,
    which happens without help, or until MPI has sent or received it. The latter may need the peer
    to come to its side of this message, and the peer may come to that only after other messages, in
    an order that is not known here. So no message may wait for a buffer that another one holds: its
    first buffer is always granted (PinnedPool.take), and with one buffer it goes through, chunk
    after chunk. Further buffers hide the copies. They come from a limited ring, and no message
    waits for them. Of messages with one name a later one waits for the earlier one, as it does in
    MPI.
    """

    piece_bytes = CHUNK_BYTES

    def __init__(self, comm: Communicator, channels: int = 1, synchronous: bool = False) -> None:
        super().__init__(comm, channels, synchronous)
        self.outgoing = _Outgoing
        self.incoming = _Incoming
        self.outward = arrays.side_stream()
        self.inward = arrays.side_stream()
        self.out_pool = PinnedPool(RING * self.piece_bytes)
        self.in_pool = PinnedPool(RING * self.piece_bytes)
        # chunks on their way out to the host, and in to the device
        self.copied: deque[tuple[Event, _Outgoing, np.ndarray, int]] = deque()  # bytes last
        self.returned: deque[tuple[Event, _Incoming, np.ndarray]] = deque()

    def progress(self) -> bool:
        while self.copied and arrays.is_done(self.copied[0][0]):
            _, sending, buffer, nbytes = self.copied.popleft()
            sending.send(buffer, nbytes)
        while self.returned and arrays.is_done(self.returned[0][0]):
            _, receiving, buffer = self.returned.popleft()
            receiving.in_use -= 1
            self.in_pool.give(buffer)
        return super().progress()

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self.out_pool.drop_buffers()
        self.in_pool.drop_buffers()

    def close(self) -> None:
        for event, *_ in self.returned:
            event.synchronize()
        super().close()


@dataclass(eq=False, repr=False)
class _Staged(DeviceMessage):
    """A message in chunks."""

    transport: StagedTransport

    def __post_init__(self) -> None:
        self.bytes = self.array.reshape(-1).view(np.uint8)  # the array as bytes
        self.next = 0  # byte at which the next chunk begins
        self.in_use = 0  # buffers in use
        # chunks that have had no buffer yet
        self.untaken = -(-max(1, self.array.nbytes) // self.transport.piece_bytes)
        self.unsent = self.untaken  # chunks on the way out that MPI has not had yet
        self.arrived: Event | None = None  # after the last copy in
        # (MPI request, buffer, chunk) of each chunk that MPI has, oldest first; chunk is None on
        # the way out
        self.wire: deque[tuple[Request, np.ndarray, DeviceArray]] = deque()

    def _chunks(self, pool: PinnedPool) -> Iterator[tuple[np.ndarray, DeviceArray]]:
        """(buffer, chunk of the array) of each next chunk for which there is a buffer."""
        size = self.transport.piece_bytes
        while self.untaken and self.in_use < DEPTH:
            buffer = pool.take(min(size, self.array.nbytes), first=self.in_use == 0)
            if buffer is None:
                return
            chunk = self.bytes[self.next : self.next + size]
            self.in_use += 1
            self.untaken -= 1
            self.next += size
            yield buffer, chunk

    def _withdraw(self) -> None:
        for request, *_ in self.wire:
            request.Cancel()


class _Outgoing(_Staged):
    """A message that is sent in chunks."""

    def advance(self) -> None:
        transport = self.transport
        while self.wire and self.wire[0][0].Test():
            transport.out_pool.give(self.wire.popleft()[1])
            self.in_use -= 1
        begins = self.next == 0
        for buffer, chunk in self._chunks(transport.out_pool):
            with transport.outward:
                if begins:
                    begins = False
                    arrays.wait_for(self.ready)
                if chunk.nbytes:
                    arrays.copy_to_host(buffer[: chunk.nbytes], chunk)
                transport.copied.append((arrays.record(), self, buffer, chunk.nbytes))
        self.finished = self.posted and self.in_use == 0

    def send(self, buffer: np.ndarray, nbytes: int) -> None:
        """Hand MPI a chunk that has arrived on the host, in the order of their copies."""
        peer, channel, tag = self.name
        request = own(self.transport.host.senders[channel](buffer[:nbytes], peer, tag))
        self.wire.append((request, buffer, None))
        self.unsent -= 1
        self.posted = self.unsent == 0


class _Incoming(_Staged):
    """A message that is received in chunks."""

    def advance(self) -> None:
        transport = self.transport
        peer, channel, tag = self.name
        for buffer, chunk in self._chunks(transport.in_pool):
            receive = transport.host.receivers[channel]
            self.wire.append((own(receive(buffer[: chunk.nbytes], peer, tag)), buffer, chunk))
            self.posted = self.untaken == 0
        while self.wire and self.wire[0][0].Test():
            _, buffer, chunk = self.wire.popleft()
            with transport.inward:
                if self.arrived is None:
                    arrays.wait_for(self.ready)
                if chunk.nbytes:
                    arrays.copy_to_device(chunk, buffer[: chunk.nbytes])
                self.arrived = arrays.record()
            transport.returned.append((self.arrived, self, buffer))
        self.finished = self.posted and not self.wire

    def Test(self) -> bool:
        """As for any message; once it is true, later work on the current stream finds the data."""
        if not super().Test():
            return False
        arrays.wait_for(self.arrived)
        return True


# -- Pinned host memory that messages pass through, one chunk at a time ----------------------------


SMALLEST = 4096  # bytes: what a header needs


class PinnedPool:
    """Buffers of pinned memory; the size of each is a power of two.

    A message's first buffer is granted even above `limit` bytes, so no message ever waits for a
    buffer that another one holds (StagedTransport says why). So never more is in use than `limit`
    bytes and one buffer for each message.
    """

    def __init__(self, limit: int) -> None:
        # bytes
        self.limit = limit
        self.used = 0
        # size -> buffers that no message uses
        self.free: dict[int, list[np.ndarray]] = defaultdict(list)

    def take(self, nbytes: int, first: bool) -> np.ndarray | None:
        """Return `nbytes` or more; None at the limit, except for a message's `first` buffer."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        if not first and self.used + size > self.limit:
            return None
        self.used += size
        free = self.free[size]
        if free:
            return free.pop()
        return arrays.pinned(size)

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back that neither MPI nor the device touches any more."""
        self.used -= buffer.size
        self.free[buffer.size].append(buffer)

    def drop_buffers(self) -> None:
        self.free.clear()
