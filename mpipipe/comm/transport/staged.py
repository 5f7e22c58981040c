"""Messages of device arrays through pinned host memory, for an MPI that needs that."""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import AbstractContextManager
from functools import cached_property, partial

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Event
from mpipipe.comm.pieces import ArrayPiece, PieceRequest
from mpipipe.comm.transport.device import DeviceTransport
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
        self.out_pool = PinnedPool(RING * self.piece_bytes)
        self.in_pool = PinnedPool(RING * self.piece_bytes)
        self.outgoing = partial(Chunk, self.out_pool, slice(None), False)
        self.incoming = partial(Chunk, self.in_pool, None, True)

    def close(self) -> None:
        self.in_pool.finish()
        super().close()


class Chunk(ArrayPiece):
    """A piece that goes through pinned memory.

    `gives` are the bytes of it that are copied there, if any; if it `comes`, all are copied back.
    """

    def __init__(
        self,
        pool: PinnedPool,
        gives: slice | None,
        comes: bool,
        whole: PieceRequest,
        part: Array,
        start: int = 0,
    ) -> None:
        super().__init__(whole, part, start)
        self.pool = pool
        self.gives = gives
        self.comes = comes
        self.copied: Event | None = None
        self.taken: np.ndarray | None = None

    def prepare(self, is_first: bool) -> bool:
        if self.taken is None:
            self.taken = self.pool.take(self.part.nbytes, is_first)
            if self.taken is None:
                return False
            self.memory = self.taken[: self.part.nbytes]
            if self.gives is not None:
                with self.pool.outward:
                    arrays.wait_for(self.whole.ready)
                    if self.part[self.gives].nbytes:
                        arrays.copy_to_host(self.memory[self.gives], self.part[self.gives])
                    self.copied = arrays.record()
        return True

    def post(self) -> bool:
        return (self.copied is None or arrays.is_done(self.copied)) and super().post()

    def finish(self) -> None:
        super().finish()
        assert self.taken is not None
        arrived = None
        if self.comes:
            with self.pool.inward:
                arrays.wait_for(self.whole.ready)
                if self.part.nbytes:
                    arrays.copy_to_device(self.part, self.memory)
                arrived = arrays.record()
            self.whole.arrived = arrived
        self.pool.give(self.taken, arrived)


# -- Pinned host memory that messages pass through, one chunk at a time ----------------------------


SMALLEST = 4096  # bytes: what a header needs


class PinnedPool:
    """Buffers of pinned memory, and streams for the copies; sizes are powers of two.

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
        # Buffers whose content is on its way to the device.
        self.returning: deque[tuple[Event, np.ndarray]] = deque()

    @cached_property
    def outward(self) -> AbstractContextManager:
        return arrays.side_stream()

    @cached_property
    def inward(self) -> AbstractContextManager:
        return arrays.side_stream()

    def take(self, nbytes: int, first: bool) -> np.ndarray | None:
        """Return `nbytes` or more; None at the limit, except for a message's `first` buffer."""
        self.collect()
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        if not first and self.used + size > self.limit:
            return None
        self.used += size
        free = self.free[size]
        if free:
            return free.pop()
        return arrays.pinned(size)

    def give(self, buffer: np.ndarray, after: Event | None = None) -> None:
        """Take a buffer back that MPI does not touch any more, nor the device `after` an event."""
        if after is not None:
            self.returning.append((after, buffer))
            return
        self.used -= buffer.size
        self.free[buffer.size].append(buffer)

    def collect(self) -> None:
        """Take back the buffers whose content is on the device."""
        while self.returning and arrays.is_done(self.returning[0][0]):
            self.give(self.returning.popleft()[1])

    def finish(self) -> None:
        """Let the host wait for the copies to the device, before the buffers are freed."""
        for event, _ in self.returning:
            event.synchronize()
        self.returning.clear()
