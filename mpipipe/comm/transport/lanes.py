"""The two ends of a lane: messages from one rank to another by NCCL, each announced by a note of MPI.

transport/nccl.py says what the rules are, and why they cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any, Protocol

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray, Event
from mpipipe.comm.group import Group
from mpipipe.comm.nccl.channel import Channel, new_identity, open_together
from mpipipe.comm.nccl.task import Task
from mpipipe.comm.requests import keep_forever, own
from mpipipe.comm.transport.device import Name
from mpipipe.comm.types import Communicator, Engine, Request
from mpipipe.errors import MismatchError

NOTE_TAG = 0  # on a communicator for notes alone
Pair = tuple[int, int]  # of ranks: from, to


class LaneOwner(Engine, Protocol):
    """What a lane asks of its transport: to advance all lanes, the communicator for notes, and the group."""

    notes: Communicator
    group: Group


def open_channels(group: Group, pairs: list[Pair]) -> dict[Pair, Channel]:
    """The channels of the lanes of which this rank is one end; threads open them, so they need no common order."""
    what = "opening NCCL between the ranks of the pipeline"
    mine = {pair: new_identity() for pair in pairs if pair[0] == group.rank}
    identities = {pair: identity for each in group.gather(what, mine) for pair, identity in each.items()}
    here = [pair for pair in pairs if group.rank in pair]
    tasks = [Task(partial(_open_channel, int(pair[1] == group.rank), identities[pair]), what) for pair in here]
    return dict(zip(here, open_together(tasks, group, what)))


def _open_channel(end: int, identity: bytes) -> Channel:
    """One end of a lane, 0 for the one that sends; one byte goes through, so that NCCL has connected the two."""
    byte = arrays.zeros(1, np.uint8, "cuda")
    arrays.stream().synchronize()
    return Channel(2, end, identity, partial(_move, byte, end))


def _move(array: DeviceArray, end: int, communicator: Any, stream: int) -> None:
    """Send an array as bytes from end 0 of a lane to end 1."""
    move = communicator.recv if end else communicator.send
    move(arrays.address(array), array.nbytes, arrays.nccl().NCCL_UINT8, 1 - end, stream)


class _Send:
    """The request of a message that is sent."""

    def __init__(self, transport: LaneOwner, array: DeviceArray, name: Name) -> None:
        self.transport, self.array, self.name, self.ready = transport, array, name, arrays.record()
        self.note = np.array([*name[1:], array.nbytes], np.int64)
        self.event: Event | None = None
        self.announced: Request | None = None
        self.finished = False

    def Test(self) -> bool:
        """Whether the array may change."""
        if not self.finished:
            self.transport.progress()
        return self.finished

    def Cancel(self) -> None:
        """Nothing on a device can be withdrawn: the transport's `abort` ends it."""
        keep_forever((self, self.transport))


class _Receive:
    """The request of a message that is received; `free` is the event behind the last work that reads its buffer."""

    def __init__(self, transport: LaneOwner, array: DeviceArray, name: Name, free: Event) -> None:
        self.transport, self.array, self.name, self.free = transport, array, name, free
        self.event: Event | None = None  # behind the receive
        self.content: DeviceArray | None = None  # what came early: held until the current stream waits for its copy
        self.finished = False

    def Test(self) -> bool:
        """Whether it is on the stream; once it is true, later work on the current stream finds the data."""
        if self.event is None:
            self.transport.progress()
        if self.event is not None and not self.finished:
            self.finished = True
            arrays.wait_for(self.event)
        return self.finished

    def Cancel(self) -> None:
        """Nothing on a device can be withdrawn: the transport's `abort` ends it."""
        keep_forever((self, self.transport))


class OutgoingLane:
    """The sends to one rank, of which only the first may be on the stream."""

    def __init__(self, transport: LaneOwner, peer: int, channel: Channel) -> None:
        self.transport, self.notes, self.peer, self.channel = transport, transport.notes, peer, channel
        self.sends: deque[_Send] = deque()

    def send(self, array: DeviceArray, name: Name) -> _Send:
        """Send an array, behind all work on the current stream."""
        message = _Send(self.transport, array, name)
        self.sends.append(message)
        self.advance()
        return message

    def advance(self) -> None:
        """Put the first send on the stream, and the next one once it is done."""
        while self.sends:
            first = self.sends[0]
            if first.event is None:
                first.event = self._put(first)
                first.announced = own(self.notes.Isend(first.note, self.peer, NOTE_TAG))
            self.channel.check()
            if first.announced is not None and first.announced.Test():
                first.announced = None
            if first.announced is not None or not arrays.is_done(first.event):
                return
            first.finished = True
            self.sends.popleft()

    def _put(self, message: _Send) -> Event:
        if not message.array.nbytes:
            return message.ready
        return self.channel.put(partial(_move, message.array, 0), [message.ready])


class IncomingLane:
    """The receives from one rank, in the order of its notes.

    Attributes
    ----------
    expected : dict
        Name -> requests whose note has not come, in the order of the calls.
    early : dict
        Name -> (bytes, event) of messages that came before anybody asked for them.
    note : (Request, ndarray) or None
        The note on its way.
    underway : deque of (event, array)
        Receives on the stream, and what they write.
    """

    def __init__(self, transport: LaneOwner, peer: int, channel: Channel) -> None:
        self.transport, self.notes, self.peer, self.channel = transport, transport.notes, peer, channel
        self.expected: defaultdict[Name, deque[_Receive]] = defaultdict(deque)
        self.early: defaultdict[Name, deque[tuple[DeviceArray, Event]]] = defaultdict(deque)
        self.waiting = 0
        self.note: tuple[Request, np.ndarray] | None = None
        self.underway: deque[tuple[Event, DeviceArray]] = deque()

    def receive(self, array: DeviceArray, name: Name, free: Event) -> _Receive:
        """Receive into an array, behind the event `free`."""
        message = _Receive(self.transport, array, name, free)
        early = self.early[message.name]
        if early:
            content, event = early.popleft()
            self._check(message, content.nbytes)
            target = message.array.reshape(-1).view(np.uint8)
            with self.channel.stream:
                for each in (event, message.free):
                    arrays.wait_for(each)
                arrays.copy_into(target, content)
                message.event, message.content = arrays.record(), content
            self.underway.append((message.event, message.array))
            return message
        self.waiting += 1
        self.expected[message.name].append(message)
        self.advance()
        return message

    def advance(self) -> None:
        """Put receives on the stream whose notes have come; looks for notes only while somebody waits for one."""
        while self.waiting and (note := self._next_note()) is not None:
            channel, tag, nbytes = note.tolist()
            name = (self.peer, channel, tag)
            if self.expected[name]:
                message = self.expected[name].popleft()
                self.waiting -= 1
                self._check(message, nbytes)
                message.event = self._put(message.array, message.free)
            else:
                content = arrays.empty((nbytes,), np.uint8, "cuda")
                self.early[name].append((content, self._put(content, arrays.record())))
        if self.underway:
            self.channel.check()
            while self.underway and arrays.is_done(self.underway[0][0]):
                self.underway.popleft()

    def _put(self, array: DeviceArray, free: Event) -> Event:
        if not array.nbytes:
            return free
        event = self.channel.put(partial(_move, array, 1), [free])
        self.underway.append((event, array))
        return event

    def _next_note(self) -> np.ndarray | None:
        if self.note is None:
            if not self.notes.Iprobe(self.peer, NOTE_TAG):
                return None
            content = np.empty(3, np.int64)
            self.note = own(self.notes.Irecv(content, self.peer, NOTE_TAG)), content
        request, content = self.note
        if not request.Test():
            return None
        self.note = None
        return content

    def _check(self, message: _Receive, nbytes: int) -> None:
        if message.array.nbytes != nbytes:
            _, channel, tag = message.name
            raise MismatchError(
                f"a message from rank {self.peer} has another size (channel {channel}, tag {tag})",
                rank=self.transport.group.rank,
                found=f"{nbytes} bytes",
                expected=f"{message.array.nbytes} bytes",
                remedy="give all ranks the same model and the same batch",
            )

    def settled(self) -> bool:
        """Whether all receives on the stream are done."""
        return not self.underway
