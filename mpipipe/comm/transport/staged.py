"""Messages of device arrays through pinned host memory, for an MPI that needs that."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Event
from mpipipe.comm.transport.device import DeviceTransport, Piece
from mpipipe.comm.transport.host import CHUNK_BYTES
from mpipipe.job import Communicator

RING = 8  # chunks in pinned memory and in use, each way, beyond the first one of each message


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
    depth = 3  # one is copied, one is on the wire, one is about to be

    def __init__(self, comm: Communicator, channels: int = 1, synchronous: bool = False) -> None:
        super().__init__(comm, channels, synchronous)
        self.outgoing = _Outgoing
        self.incoming = _Incoming
        self.outward = arrays.side_stream()
        self.inward = arrays.side_stream()
        self.out_pool = PinnedPool(RING * self.piece_bytes)
        self.in_pool = PinnedPool(RING * self.piece_bytes)
        # Buffers whose content is on its way to the device.
        self.returned: deque[tuple[Event, np.ndarray]] = deque()

    def progress(self) -> bool:
        while self.returned and arrays.is_done(self.returned[0][0]):
            self.in_pool.give(self.returned.popleft()[1])
        return super().progress()

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self.out_pool.drop_buffers()
        self.in_pool.drop_buffers()

    def close(self) -> None:
        for event, _ in self.returned:
            event.synchronize()
        super().close()


class _Outgoing(Piece):
    """A chunk that is sent."""

    buffer: np.ndarray | None = None
    copied: Event

    def prepare(self, is_first: bool) -> bool:
        transport = self.message.transport
        if self.buffer is None:
            nbytes = self.part.nbytes
            self.buffer = transport.out_pool.take(nbytes, is_first)
            if self.buffer is None:
                return False
            with transport.outward:
                arrays.wait_for(self.message.ready)
                if nbytes:
                    arrays.copy_to_host(self.buffer[:nbytes], self.part)
                self.copied = arrays.record()
        return True

    def post(self) -> bool:
        if self.request is None and arrays.is_done(self.copied):
            self._start(self.buffer[: self.part.nbytes])
        return self.request is not None

    def finish(self) -> None:
        super().finish()
        self.message.transport.out_pool.give(self.buffer)


class _Incoming(Piece):
    """A chunk that is received."""

    buffer: np.ndarray | None = None

    def prepare(self, is_first: bool) -> bool:
        if self.buffer is None:
            self.buffer = self.message.transport.in_pool.take(self.part.nbytes, is_first)
        return self.buffer is not None

    def post(self) -> bool:
        if self.request is None:
            self._start(self.buffer[: self.part.nbytes])
        return True

    def finish(self) -> None:
        super().finish()
        message = self.message
        nbytes = self.part.nbytes
        with message.transport.inward:
            arrays.wait_for(message.ready)
            if nbytes:
                arrays.copy_to_device(self.part, self.buffer[:nbytes])
            message.arrived = arrays.record()
        message.transport.returned.append((message.arrived, self.buffer))


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
