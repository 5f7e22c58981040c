r"""What the threads of `comm.inprocess` share: messages under way, and collectives that wait for more ranks.

    Isend  -> World.sent      \
                                >  World.progress: matched in the order that MPI prescribes, copied, both done
    Irecv  -> World.posted    /
    Ixxx   -> World.meetings  one Meeting for each collective call; complete when all ranks have brought their value

Nothing happens by itself: as in MPI, messages advance when somebody tests a request.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import numpy as np

from mpipipe.comm.process import Process
from mpipipe.errors import MpipipeError, PeerError

ANY = -1
Context: TypeAlias = tuple[Hashable, ...]  # the name of a communicator
Finish: TypeAlias = Callable[[list[Any]], object]  # what a rank does with the values of all ranks


class InProcessError(MpipipeError, RuntimeError):
    """The program under test broke a rule of message passing."""


class World:
    """All ranks of one `inprocess.run`.

    Parameters
    ----------
    ranks : int
    synchronous, delay, seed, tag_ub
        As for `inprocess.run`.

    Attributes
    ----------
    broken : bool
        Whether a rank has failed, so that collectives cannot complete.
    processes : dict
        Rank -> Process, the state of each rank.
    """

    def __init__(self, ranks: int, synchronous: bool, delay: float, seed: int, tag_ub: int) -> None:
        self.ranks, self.synchronous, self.delay, self.tag_ub = ranks, synchronous, delay, tag_ub
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.sent: dict[tuple[Context, int], list[Send]] = defaultdict(list)
        self.posted: dict[tuple[Context, int], list[Receive]] = defaultdict(list)
        self.meetings: dict[tuple[Context, int], Meeting] = {}
        self.broken = False
        self.processes: dict[int, Process] = {}

    def next_delay(self) -> float:
        """Seconds until the next message becomes visible."""
        return self.random.uniform(0, self.delay) if self.delay else 0.0

    def send(self, message: Send) -> Send:
        """Put a message on its way."""
        with self.lock:
            self.sent[message.context, message.dest].append(message)
        return message

    def post(self, receive: Receive) -> Receive:
        """Begin to wait for a message."""
        with self.lock:
            self.posted[receive.context, receive.dest].append(receive)
        return receive

    def withdraw(self, receive: Receive) -> None:
        """Take a receive back that has found no message."""
        with self.lock:
            waiting = self.posted[receive.context, receive.dest]
            if receive in waiting:
                waiting.remove(receive)

    def progress(self, context: Context, dest: int) -> None:
        """Match posted receives with sent messages, in the order that MPI prescribes."""
        with self.lock:
            sent, posted = self.sent[context, dest], self.posted[context, dest]
            for receive in list(posted):
                message = next((m for m in sent if receive.wants(m)), None)
                if message is not None and message.visible <= time.monotonic():
                    posted.remove(receive)
                    sent.remove(message)
                    receive.complete(message)
                    message.done = True

    def probe(self, context: Context, dest: int, source: int, tag: int) -> bool:
        """Whether such a message is visible."""
        with self.lock:
            now = time.monotonic()
            return any(
                source in (ANY, m.source) and tag in (ANY, m.tag) and m.visible <= now for m in self.sent[context, dest]
            )

    def meet(
        self, key: tuple[Context, int], kind: str, rank: int, size: int, value: Any, finish: Finish | None
    ) -> Entry:
        """Bring the value of one rank to a collective call of a communicator of `size` ranks."""
        with self.lock:
            meeting = self.meetings.setdefault(key, Meeting(self, kind, size))
            if meeting.kind != kind:
                self.broken = True
                raise InProcessError("ranks call different collectives", rank=rank, found=kind, expected=meeting.kind)
            meeting.values[rank] = value
            if len(meeting.values) == size:
                del self.meetings[key]
        return Entry(meeting, finish)

    def check_nothing_left(self, context: Context | None = None) -> None:
        """Raise InProcessError for a message without a receive, or the other way round; None: in any communicator."""
        with self.lock:
            self._check_empty(self.sent, context, "was never received")
            self._check_empty(self.posted, context, "was posted, and nothing came")

    def _check_empty(self, boxes: Any, context: Context | None, what: str) -> None:
        for (where, dest), box in boxes.items():
            if box and (context is None or where == context):
                peer = f"from rank {box[0].source} " if box[0].source != ANY else ""
                raise InProcessError(f"a message {peer}to rank {dest} with tag {box[0].tag} {what}", rank=dest)


class Send:
    """The request of a sender; an array that is sent synchronously is not copied."""

    def __init__(
        self, world: World, context: Context, source: int, dest: int, tag: int, array: np.ndarray, synchronous: bool
    ) -> None:
        self.context, self.source, self.dest, self.tag = context, source, dest, tag
        self.array = array if synchronous else array.copy()
        self.visible = time.monotonic() + world.next_delay()
        self.done = not synchronous
        self.progress = world.progress

    def Test(self) -> bool:
        self.progress(self.context, self.dest)
        return self.done

    def Cancel(self) -> None:
        """A message that was sent stays sent."""


class Receive:
    """The request of a receiver."""

    def __init__(self, world: World, context: Context, dest: int, source: int, tag: int, array: np.ndarray) -> None:
        self.context, self.dest, self.source, self.tag, self.array = context, dest, source, tag, array
        self.done = False
        self.error: InProcessError | None = None
        self.progress, self.withdraw = world.progress, world.withdraw

    def wants(self, send: Send) -> bool:
        """Whether this receive takes that message."""
        return self.source in (ANY, send.source) and self.tag in (ANY, send.tag)

    def complete(self, send: Send) -> None:
        """Copy the message, which must fit exactly."""
        self.done = True
        found, expected = (send.array.nbytes, send.array.dtype), (self.array.nbytes, self.array.dtype)
        if found != expected:
            self.error = InProcessError(
                f"message from rank {send.source} with tag {send.tag} does not fit the receive buffer",
                rank=self.dest,
                found=f"{found[0]} bytes of {found[1]}",
                expected=f"{expected[0]} of {expected[1]}",
            )
            return
        self.array.reshape(-1)[...] = send.array.reshape(-1)

    def Test(self) -> bool:
        self.progress(self.context, self.dest)
        if self.error is not None:
            raise self.error
        return self.done

    def Cancel(self) -> None:
        self.withdraw(self)


class Meeting:
    """One collective call on one communicator."""

    def __init__(self, world: World, kind: str, size: int) -> None:
        self.world, self.kind, self.size = world, kind, size
        self.values: dict[int, Any] = {}  # of each rank that has come


class Entry:
    """One rank's request in a meeting."""

    def __init__(self, meeting: Meeting, finish: Finish | None) -> None:
        self.meeting, self.finish = meeting, finish

    def Test(self) -> bool:
        meeting = self.meeting
        if len(meeting.values) < meeting.size:
            if meeting.world.broken:
                raise PeerError("another rank failed during a collective")
            return False
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish([meeting.values[rank] for rank in range(meeting.size)])
        return True

    def Cancel(self) -> None:
        self.finish = None
