"""The communicator of ranks that are threads: the methods of mpi4py's that mpipipe uses.

It is stricter than MPI: a receive must have exactly the sender's length and dtype, all ranks must
call the same collective, and nothing may be left unreceived at the end. Sends can be synchronous.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from mpipipe.errors import MpipipeError, PeerError
from mpipipe.job.context import RankContext
from mpipipe.job.types import Buffer, Ranks

ANY = -1
PAUSE = 2e-5
Context: TypeAlias = tuple[Hashable, ...]  # the name of a communicator
Box: TypeAlias = tuple[Context, int]  # a rank of a communicator
Finish: TypeAlias = Callable[[list[Any]], object]  # called with the values of all ranks


class InProcessError(MpipipeError, RuntimeError):
    """The program under test broke a rule of message passing."""


class World:
    r"""Messages and collectives under way of the ranks of one `inprocess.run`.

    Isend  -> sent      \
                          >  progress: matched in the order that MPI prescribes, copied, both done
    Irecv  -> posted    /
    Ixxx   -> meetings  one for each collective call, complete when all ranks have come

    Nothing happens by itself: as in MPI, messages advance when somebody tests a request.
    """

    def __init__(self, ranks: int, synchronous: bool, tag_ub: int) -> None:
        self.synchronous = synchronous
        self.tag_ub = tag_ub
        self.lock = threading.RLock()
        self.sent: dict[Box, list[ThreadRequest]] = defaultdict(list)
        self.posted: dict[Box, list[ThreadRequest]] = defaultdict(list)
        # (communicator, number of the collective call) -> its kind, and the value of each rank that
        # has come
        self.meetings: dict[Box, tuple[str, dict[int, Any]]] = {}
        self.broken = False  # whether a rank has failed, so that collectives cannot complete
        self.contexts = [RankContext() for _ in range(ranks)]

    def leave(self, rank: int, returned: bool) -> None:
        """Note that this rank's function has ended; tell the others if it has returned."""
        self.contexts[rank].ended = True
        if returned:
            for group in tuple(self.contexts[rank].groups):
                group.leave()
            for context in self.contexts:
                context.left[rank] = f"the function of rank {rank} has returned"

    def read_farewells(self) -> None:
        """Read what ranks have told those that have ended, too."""
        for context in self.contexts:
            for group in (*context.groups, *context.failed):
                group.read_messages()

    def progress(self, box: Box) -> None:
        """Match posted receives with sent messages, in the order that MPI prescribes."""
        with self.lock:
            sent = self.sent[box]
            posted = self.posted[box]
            for receive in list(posted):
                message = next(filter(receive.takes, sent), None)
                if message is not None:
                    posted.remove(receive)
                    sent.remove(message)
                    receive.complete(message)

    def check_nothing_left(self, context: Context | None = None) -> None:
        """Raise InProcessError for a message or a receive alone; None: in any communicator."""
        problems = ("was never received", "was posted, and nothing came")
        with self.lock:
            for boxes, problem in zip((self.sent, self.posted), problems):
                for (box_context, dest), box in boxes.items():
                    if box and context in (None, box_context):
                        peer = ""
                        if box[0].source != ANY:
                            peer = f"from rank {box[0].source} "
                        text = f"a message {peer}to rank {dest} with tag {box[0].tag} {problem}"
                        raise InProcessError(text, rank=dest)


@dataclass(eq=False, repr=False)
class ThreadRequest:
    """The request of a sender or of a receiver."""

    world: World
    box: Box
    source: int
    tag: int
    array: np.ndarray
    done: bool = False
    error: InProcessError | None = None

    def takes(self, sent: ThreadRequest) -> bool:
        """Return whether this receive takes a message that was sent."""
        return self.source in (ANY, sent.source) and self.tag in (ANY, sent.tag)

    def complete(self, sent: ThreadRequest) -> None:
        """Copy the message, which must fit exactly."""
        found = (sent.array.nbytes, sent.array.dtype)
        expected = (self.array.nbytes, self.array.dtype)
        if found == expected:
            self.array.reshape(-1)[...] = sent.array.reshape(-1)
        else:
            text = f"message from rank {sent.source} with tag {sent.tag} does not fit"
            self.error = InProcessError(
                f"{text} the receive buffer",
                rank=self.box[1],
                found=f"{found[0]} bytes of {found[1]}",
                expected=f"{expected[0]} of {expected[1]}",
            )
        # The other rank may look at any time, and must find the data then.
        self.done = sent.done = True

    def Test(self) -> bool:
        self.world.progress(self.box)
        if self.error is not None:
            raise self.error
        return self.done

    def Cancel(self) -> None:
        """Withdraw a receive; a message that was sent stays sent."""
        with self.world.lock:
            if self in self.world.posted[self.box]:
                self.world.posted[self.box].remove(self)


@dataclass(eq=False, repr=False)
class MeetingRequest:
    """One rank's request in a collective call; `values` are those of the ranks that have come."""

    comm: ThreadCommunicator
    values: dict[int, Any]
    finish: Finish | None

    def Test(self) -> bool:
        if len(self.values) < self.comm.size:
            if self.comm.world.broken:
                raise PeerError("another rank failed during a collective")
            return False
        if self.finish is not None:
            finish = self.finish
            self.finish = None
            finish([self.values[rank] for rank in range(self.comm.size)])
        return True

    def Cancel(self) -> None:
        self.finish = None


class ThreadCommunicator:
    """The calling thread's end of a communicator; methods, ranks and tags as in mpi4py.

    `members` are world ranks.
    """

    def __init__(self, world: World, context: Context, members: Ranks, rank: int) -> None:
        self.world = world
        self.context = context
        self.members = members
        self.rank = rank
        self.size = len(members)
        self.items: dict[Hashable, Any] = {}  # closed when it is freed
        self._collectives = 0

    # -- messages ----------------------------------------------------------------------------------

    def Isend(self, buf: np.ndarray, dest: int, tag: int = 0) -> ThreadRequest:
        if self.world.synchronous:
            return self.Issend(buf, dest, tag)
        message = self.Issend(buf.copy(), dest, tag)
        message.done = True
        return message

    def Issend(self, buf: np.ndarray, dest: int, tag: int = 0) -> ThreadRequest:
        world = self.world
        limits = (("tag out of range", tag, world.tag_ub), ("no such rank", dest, self.size - 1))
        for what, number, largest in limits:
            if not 0 <= number <= largest:
                raise InProcessError(what, rank=self.rank, found=number, expected=f"0 to {largest}")
        message = ThreadRequest(world, (self.context, dest), self.rank, tag, buf)
        with world.lock:
            world.sent[message.box].append(message)
        return message

    def Irecv(self, buf: np.ndarray, source: int = ANY, tag: int = ANY) -> ThreadRequest:
        receive = ThreadRequest(self.world, (self.context, self.rank), source, tag, buf)
        with self.world.lock:
            self.world.posted[receive.box].append(receive)
        return receive

    def Iprobe(self) -> bool:
        with self.world.lock:
            return bool(self.world.sent[self.context, self.rank])

    # -- collectives -------------------------------------------------------------------------------

    def Iallreduce(self, sendbuf: np.ndarray | None, recvbuf: np.ndarray) -> MeetingRequest:
        content = (recvbuf if sendbuf is None else sendbuf).copy()
        return self._collective(
            "Iallreduce", content, lambda parts: np.copyto(recvbuf, reduce(np.add, parts))
        )

    def Iallgather(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> MeetingRequest:
        content = sendbuf.reshape(-1).copy()
        rows = recvbuf.reshape(self.size, -1)
        return self._collective("Iallgather", content, lambda parts: np.stack(parts, out=rows))

    def Iallgatherv(self, sendbuf: object, recvbuf: Buffer) -> MeetingRequest:
        whole, (counts, starts) = recvbuf  # this rank's part lies in place
        own_start = starts[self.rank]
        own_part = whole[own_start : own_start + counts[self.rank]]

        def finish(parts: list[np.ndarray]) -> None:
            for start, part in zip(starts, parts):
                whole[start : start + len(part)] = part

        return self._collective("Iallgatherv", own_part.copy(), finish)

    def Ibcast(self, buf: np.ndarray, root: int = 0) -> MeetingRequest:
        return self._collective("Ibcast", buf.copy(), lambda parts: np.copyto(buf, parts[root]))

    def allgather(self, sendobj: object) -> list[Any]:
        gathered: list[Any] = []
        request = self._collective("allgather", sendobj, gathered.extend)
        while not request.Test():
            time.sleep(PAUSE)
        return gathered

    def Barrier(self) -> None:
        self.allgather(None)

    def _collective(self, kind: str, value: object, finish: Finish | None) -> MeetingRequest:
        self._collectives += 1
        world = self.world
        key = (self.context, self._collectives)
        with world.lock:
            expected, values = world.meetings.setdefault(key, (kind, {}))
            if expected != kind:
                world.broken = True
                raise InProcessError(
                    "ranks call different collectives",
                    rank=self.rank,
                    found=kind,
                    expected=expected,
                )
            values[self.rank] = value
            if len(values) == self.size:
                del world.meetings[key]
        return MeetingRequest(self, values, finish)

    # -- communicators and their attributes --------------------------------------------------------

    def Split(self, color: int = 0, key: int = 0) -> ThreadCommunicator:
        context = (*self.context, self._collectives, color)
        everyone = sorted(self.allgather((color, key, self.rank)))
        ranks = [rank for other_color, _, rank in everyone if other_color == color]
        members = tuple(self.members[rank] for rank in ranks)
        return ThreadCommunicator(self.world, context, members, ranks.index(self.rank))

    def Idup(self) -> tuple[ThreadCommunicator, MeetingRequest]:
        context = (*self.context, self._collectives, "dup")
        request = self._collective("Idup", None, None)
        return ThreadCommunicator(self.world, context, self.members, self.rank), request

    def Dup(self) -> ThreadCommunicator:
        return self.Idup()[0]

    def Free(self) -> None:
        for item in reversed(self.items.values()):  # the group, in which the others were made, last
            item.close()
        self.Barrier()
        self.world.check_nothing_left(self.context)
