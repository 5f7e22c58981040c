"""Tagged messages of one rank's pipeline: receives posted ahead, sends that no action waits for, buffers used again.

The name of a message, not its order, decides what arrives where. There are two ways to receive. Where the shapes of
all messages are known (`begin_call`), buffers are posted ahead of their data, at most `window` of them. Where they are
not known, a small header comes first (`take_header`, then `take_unknown`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpipipe.arrays import Array, Shape, read_only
from mpipipe.errors import ArgumentError
from mpipipe.job import RankGroup, own, wait_for
from mpipipe.trace import Recorder

HEADER_BYTES = 4096
Leaf: TypeAlias = "tuple[Shape, np.dtype]"
Buffer: TypeAlias = "tuple[Array, Array]"  # to receive into, and its view that is handed out, read-only on the host
Lease: TypeAlias = "Sequence[tuple[list, Buffer]]"  # (where the buffer belongs, buffer) of each array of a message


class Envelope(NamedTuple):
    """The name of a message: where it goes or comes from, and its (channel, tag) for header and data."""

    peer: int
    edge: int
    microbatch: int
    direction: int
    header: tuple[int, int]
    data: tuple[int, int]
    skip: str = ""  # its name, where the edge is no edge of the chain of stages

    @property
    def name(self) -> tuple[int, int, int]:
        """Edge, micro-batch and direction, the same at both ends."""
        return self.edge, self.microbatch, self.direction

    @property
    def subject(self) -> str:
        """What the message holds, the same at both ends."""
        edge = f"skip {self.skip!r}" if self.skip else f"edge {self.edge}"
        return f"the {('activation', 'gradient')[self.direction]} of micro-batch {self.microbatch} over {edge}"

    def __str__(self) -> str:
        channel, tag = self.data
        return f"{self.subject} from rank {self.peer} (channel {channel}, tag {tag})"


class Mailbox:
    """All messages of one pipeline on one rank, by a transport, and in the calls of `group`, if there is one.

    A received array is a buffer that is used again: the lease that comes with it must go back through `release` once
    nothing reads the array any more.
    """

    def __init__(self, transport: Any, group: RankGroup | None = None):
        self.transport, self.group = transport, group
        self.slots: dict[Leaf, list[Buffer]] = defaultdict(list)  # (shape, dtype) -> free buffers
        self.outgoing: deque = deque()  # requests of sends, oldest first; each keeps its array alive
        self.posted: deque = deque()  # (arrays, lease, requests, envelope), in the order of `incoming`
        self.incoming: list = []
        self.next = 0
        self.sent: list[Envelope] = []  # in this call: one for each of the requests that were in `outgoing`
        self.polls = 0  # so far: a sign of progress
        self.taken = 0  # messages of this call
        self.recorder: Recorder | None = None

    def receive_schedule(self, envelopes: Sequence[Envelope], leaves: Sequence[Sequence[Leaf]]) -> list:
        """Return what `begin_call` takes: each envelope, in order, with the buffers that its arrays need."""
        return [
            (envelope, envelope.peer, *envelope.data, [(self.slots[leaf], *leaf) for leaf in shapes])
            for envelope, shapes in zip(envelopes, leaves)
        ]

    def begin_call(self, schedule: list, window: int) -> None:
        """Begin a step whose incoming messages are known; the first `window` receives are posted at once.

        `schedule` is what `receive_schedule` returned.
        """
        self.incoming, self.next, self.taken = schedule, 0, 0
        self.sent = self.sent[-len(self.outgoing) :] if self.outgoing else []
        for _ in range(min(window, len(schedule))):
            self._post_next()

    def _post_next(self) -> None:
        if self.next == len(self.incoming):
            return
        envelope, peer, channel, tag, leaves = self.incoming[self.next]
        self.next += 1
        received, lease, requests = [], [], []
        transport = self.transport
        for free, shape, kind in leaves:
            if free:
                buffer = free.pop()
            else:
                array = transport.empty(shape, kind)
                buffer = array, read_only(array)
            received.append(buffer[1])
            lease.append((free, buffer))
            requests.append(transport.irecv(buffer[0], peer, channel, tag))
        self.posted.append((received, lease, requests, envelope))

    def take(self) -> tuple[list, Lease]:
        """Return the arrays of the next expected message, and their lease."""
        arrays, lease, requests, envelope = self.posted[0]
        for request in requests:
            if not request.Test():
                wait_for(request, envelope, self.group, peer=envelope.peer)
        self.posted.popleft()
        self.taken += 1
        self._post_next()
        return arrays, lease

    def take_header(self, envelope: Envelope) -> bytes:
        """Return the header of a message whose shapes are not known yet."""
        header = np.empty(HEADER_BYTES, np.uint8)
        request = own(self.transport.irecv(header, envelope.peer, *envelope.header))
        wait_for(request, envelope, self.group, peer=envelope.peer)
        return header.tobytes().rstrip(b"\0")

    def take_unknown(self, envelope: Envelope, leaves: Sequence[Leaf]) -> tuple[list, Lease]:
        """Return the arrays of a message, as its header described them, and their lease."""
        self.incoming, self.next = self.receive_schedule([envelope], [leaves]), 0
        self._post_next()
        return self.take()

    def put_header(self, envelope: Envelope, content: bytes) -> None:
        """Announce a message of new shapes."""
        if len(content) > HEADER_BYTES:
            raise ArgumentError(
                "too many arrays between two stages",
                found=f"a header of {len(content)} bytes",
                expected=f"at most {HEADER_BYTES}",
                remedy="stack arrays of one shape into one",
            )
        header = np.zeros(HEADER_BYTES, np.uint8)
        header[: len(content)] = np.frombuffer(content, np.uint8)
        self.outgoing.append(self.transport.isend(header, envelope.peer, *envelope.header))
        self.sent.append(envelope)

    def put(self, envelope: Envelope, arrays: Sequence[Array]) -> None:
        """Send C-contiguous arrays; they must not change until the step has ended. Never waits."""
        peer, (channel, tag) = envelope[0], envelope[5]
        outgoing = self.outgoing
        while outgoing and outgoing[0].Test():
            outgoing.popleft()
        if self.recorder is not None:
            self.recorder.send(envelope.name, peer, sum(array.nbytes for array in arrays))
        for array in arrays:
            outgoing.append(self.transport.isend(array, peer, channel, tag))
            self.sent.append(envelope)
        if not arrays:
            self.sent.append(envelope)

    def release(self, lease: Lease) -> None:
        """Give buffers back; on a device, work queued so far on the current stream may still read them."""
        transport = self.transport
        for free, buffer in lease:
            if transport.retires:
                transport.retire(buffer[0])
            free.append(buffer)

    def poll(self) -> None:
        """Let MPI move data: large messages advance only inside MPI calls, and one call advances them all."""
        self.polls += 1
        if self.transport.progress():
            return  # a test of a device message would make the current stream wait for it
        if self.outgoing:
            if self.outgoing[0].Test():
                self.outgoing.popleft()
        elif self.posted:
            for request in self.posted[0][2]:
                request.Test()

    def flush(self) -> None:
        """Wait until everything sent has left, and everything received is there."""
        while self.outgoing:
            request = self.outgoing[0]
            if not request.Test():
                oldest = self.sent[-len(self.outgoing)]
                what = f"{oldest.subject} to be received by rank {oldest.peer}"
                wait_for(request, what, self.group, peer=oldest.peer)
            self.outgoing.popleft()

    def drop_buffers(self) -> None:
        """Drop all free buffers; their shapes will not come again."""
        self.slots.clear()
        self.transport.drop_buffers()

    def cancel(self) -> None:
        """Withdraw posted receives after a failure; the pipeline cannot be used any more."""
        for _, _, requests, _ in self.posted:
            for request in requests:
                own(request).Cancel()
        self.transport.abort()
        self._let_go()

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Forget all requests. Those that are not complete keep themselves, and their buffers, alive for ever.

        Until it has tested true a request stays in `posted` or `outgoing`, whatever is raised, and needs no owner.
        """
        for request in [*(request for entry in self.posted for request in entry[2]), *self.outgoing]:
            own(request)
        self.posted, self.outgoing = deque(), deque()
