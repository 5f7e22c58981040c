"""Tagged messages of one rank's pipeline: receives come ahead, and no action waits to send.

The name of a message, not its order, decides what arrives where. There are two ways to receive.
Where the shapes of all messages are known (`begin_call`), buffers are posted ahead of their data,
at most `window` of them. Where they are not known, a small header comes first (`take_header`, then
`take_unknown`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpipipe.arrays import Array, Shape, read_only
from mpipipe.comm.transport.host import Start, Transport
from mpipipe.errors import ArgumentError
from mpipipe.job import RankGroup, Request, own, wait_for
from mpipipe.trace import Recorder

HEADER_BYTES = 4096
Leaf: TypeAlias = "tuple[Shape, np.dtype]"


class ReceiveBuffer(NamedTuple):
    """A buffer, the view of it that is handed out, and the list of free ones like it.

    The view is read-only on the host.
    """

    free: list[ReceiveBuffer]
    buffer: Array
    view: Array


Lease: TypeAlias = Sequence[ReceiveBuffer]  # the buffers of a message


class Envelope(NamedTuple):
    """The name of a message: both ends, and its (channel, tag) for header and data."""

    peer: int
    edge: int
    unit: int
    direction: int
    header: tuple[int, int]
    data: tuple[int, int]
    skip: str = ""  # its name, where the edge is no edge of the chain of stages

    @property
    def name(self) -> tuple[int, int, int]:
        """Edge, micro-batch and direction, the same at both ends."""
        return self.edge, self.unit, self.direction

    @property
    def subject(self) -> str:
        """What the message holds, the same at both ends."""
        edge = f"edge {self.edge}"
        if self.skip:
            edge = f"skip {self.skip!r}"
        return (
            f"the {('activation', 'gradient')[self.direction]} of micro-batch "
            f"{self.unit} over {edge}"
        )

    def __str__(self) -> str:
        channel, tag = self.data
        return f"{self.subject} from rank {self.peer} (channel {channel}, tag {tag})"


class Incoming(NamedTuple):
    """One array that is to come, with the transport's function that starts to receive it."""

    envelope: Envelope
    start: Start
    peer: int
    tag: int
    free: list[ReceiveBuffer]
    leaf: Leaf


class Mailbox:
    """All messages of one pipeline on one rank, by a transport, in the calls of `group`.

    A received array is a buffer that is used again: its slot must go back through `release` once
    nothing reads the array any more. The arrays of one message travel, and are taken, one after the
    other.
    """

    def __init__(self, transport: Transport, group: RankGroup | None = None):
        self.transport = transport
        self.group = group
        # (shape, dtype) -> free buffers
        self.slots: dict[Leaf, list[ReceiveBuffer]] = defaultdict(list)
        # Sends, oldest first; each keeps its array alive.
        self.outgoing: deque[tuple[Request, Envelope]] = deque()
        # Receives in the order of `incoming`.
        self.posted: deque[tuple[ReceiveBuffer, Request, Envelope]] = deque()
        self.incoming: Iterator[Incoming] = iter(())
        self.polls = 0  # a sign of progress
        self.recorder: Recorder | None = None

    def receive_schedule(
        self, envelopes: Sequence[Envelope], leaves: Sequence[Sequence[Leaf]]
    ) -> list[Incoming]:
        """Return what `begin_call` takes: the arrays of all messages, in order."""
        schedule = []
        for envelope, shapes in zip(envelopes, leaves):
            channel, tag = envelope.data
            for leaf in shapes:
                start = self.transport.receiver(channel, *leaf)
                schedule.append(
                    Incoming(envelope, start, envelope.peer, tag, self.slots[leaf], leaf)
                )
        return schedule

    def begin_call(self, schedule: Sequence[Incoming], window: int) -> None:
        """Begin a step whose incoming arrays are known; `window` receives are posted at once.

        `schedule` is what `receive_schedule` returned.
        """
        self.incoming = iter(schedule)
        for _ in range(window):
            self._post_next()

    def _post_next(self) -> None:
        for envelope, start, peer, tag, free, leaf in self.incoming:
            if free:
                slot = free.pop()
            else:
                array = self.transport.empty(*leaf)
                slot = ReceiveBuffer(free, array, read_only(array))
            self.posted.append((slot, start(slot.buffer, peer, tag), envelope))
            return

    def take(self) -> ReceiveBuffer:
        """Wait for the next expected array; return its slot."""
        posted = self.posted
        slot, request, envelope = posted[0]
        if not request.Test():
            wait_for(request, envelope, self.group, peer=envelope.peer)
        posted.popleft()
        self._post_next()
        return slot

    def take_header(self, envelope: Envelope) -> bytes:
        """Return the header of a message whose shapes are not known yet."""
        header = np.empty(HEADER_BYTES, np.uint8)
        request = own(self.transport.irecv(header, envelope.peer, *envelope.header))
        wait_for(request, envelope, self.group, peer=envelope.peer)
        return header.tobytes().rstrip(b"\0")

    def take_unknown(self, envelope: Envelope, leaves: Sequence[Leaf]) -> Lease:
        """Return the slots of a message, whose arrays are as its header described them."""
        self.incoming = iter(self.receive_schedule([envelope], [leaves]))
        for _ in leaves:
            self._post_next()
        return [self.take() for _ in leaves]

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
        self.outgoing.append(
            (self.transport.isend(header, envelope.peer, *envelope.header), envelope)
        )

    def put(self, envelope: Envelope, arrays: Sequence[Array]) -> None:
        """Send C-contiguous arrays; they must not change until the step has ended. Never waits."""
        if self.recorder is not None:
            self.recorder.send(envelope.name, envelope.peer, sum(array.nbytes for array in arrays))
        outgoing = self.outgoing
        while outgoing and outgoing[0][0].Test():
            outgoing.popleft()
        for array in arrays:
            outgoing.append((self.transport.isend(array, envelope.peer, *envelope.data), envelope))

    def put_array(self, start: Start, envelope: Envelope, array: Array) -> None:
        """Do what `put` does for one array, by the transport's `sender`, without recording."""
        outgoing = self.outgoing
        while outgoing and outgoing[0][0].Test():
            outgoing.popleft()
        _, tag = envelope.data
        outgoing.append((start(array, envelope.peer, tag), envelope))

    def release(self, lease: Lease) -> None:
        """Give buffers back; on a device, work queued so far may still read them."""
        for slot in lease:
            slot.free.append(slot)

    def poll(self) -> None:
        """Let MPI move data: large messages advance only inside its calls; one moves them all."""
        self.polls += 1
        if self.transport.progress():
            return  # a test of a device message would make the current stream wait for it
        if self.outgoing:
            if self.outgoing[0][0].Test():
                self.outgoing.popleft()
        elif self.posted:
            self.posted[0][1].Test()

    def flush(self) -> None:
        """Wait until everything sent has left, and everything received is there."""
        while self.outgoing:
            request, envelope = self.outgoing[0]
            if not request.Test():
                what = f"{envelope.subject} to be received by rank {envelope.peer}"
                wait_for(request, what, self.group, peer=envelope.peer)
            self.outgoing.popleft()

    def cancel(self) -> None:
        """Withdraw posted receives after a failure; the pipeline cannot be used any more."""
        for _, request, _ in self.posted:
            own(request).Cancel()
        self.transport.abort()
        self._let_go()

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Forget all requests; those that are not complete stay alive with their buffers.

        Until it has tested true a request stays in `posted` or `outgoing`, whatever is raised, and
        needs no owner.
        """
        for _, request, _ in self.posted:
            own(request)
        for request, _ in self.outgoing:
            own(request)
        self.posted = deque()
        self.outgoing = deque()
