"""Messages between the watchdogs of several ranks. Nothing here ever waits, but for the ranks that open a channel.

Each channel has a communicator of its own, except one: before the first group there is none that could be made without
waiting for ranks which may never come. So the watchdogs of all ranks share two tags of COMM_WORLD until then. A script
may receive there from any rank with any tag, so questions must not wait to be received: MPI gives a message to the
receive that was posted first, and those of the watchdog are posted by `runtime.world()`. Answers go to a rank that
waits in this package.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from mpipipe.comm import communicators, runtime
from mpipipe.comm.requests import own
from mpipipe.comm.types import MpiCommunicator, Request
from mpipipe.comm.wait import wait_for_ranks
from mpipipe.comm.watch.neighbours import offer_stacks

HOST_BYTES = 40
POSTED = 16  # receives for questions on COMM_WORLD: more than arrive between two looks
QUESTION_BYTES = 512
BELOW = 4711  # the largest tag itself is one that a program may use


class Kind(IntEnum):
    """What a message of a watchdog is."""

    ASK = 0  # how long have you seen no progress?
    QUIET = 1  # the answer: seconds
    ORDER = 2  # send your dump; with the ranks of your host that have not answered and that you are to look at
    DUMP = 3  # the answer: a dump.Dump
    MOVES = 4  # a rank has made progress: seconds until the next question makes sense


class Letter(NamedTuple):
    """A message that was received. `inquiry` names what it belongs to: (world rank that asks, its how many-th)."""

    source: int
    kind: Kind
    inquiry: tuple[int, int]
    content: Any


class Place(NamedTuple):
    """Where a rank runs, whether its watchdog answers while it computes, and where its stacks can be read.

    `host` is "" for a rank that has said nothing of itself.
    """

    host: str
    pid: int
    threaded: bool
    descriptor: int  # see neighbours.offer_stacks


class Channel:
    """The watchdogs of the ranks of one communicator.

    Parameters
    ----------
    comm : MpiCommunicator
        It is used as it is.
    members : tuple of int
        Rank in COMM_WORLD of each rank.
    places : sequence of Place
        Of each rank.
    tag, questions : int
        Of answers, and of all other messages; on `comm` nothing else has these. Receives for questions are posted at
        once where their tag is another one.
    """

    def __init__(
        self, comm: MpiCommunicator, members: tuple[int, ...], places: Sequence[Place], tag: int = 0, questions: int = 0
    ) -> None:
        self.comm, self.members, self.places, self.tag, self.questions = comm, members, places, tag, questions
        self.rank, self.size = comm.rank, comm.size
        self._status = runtime.mpi().Status()
        self._sending: list[Request] = []
        self._receiving: tuple[Request, np.ndarray, int] | None = None
        self._posted: deque[tuple[Any, np.ndarray]] = deque()  # requests of MPI, which have a status
        if questions != tag:
            self._posted.extend(self._post() for _ in range(POSTED))

    def _post(self) -> tuple[Any, np.ndarray]:
        buffer = np.empty(QUESTION_BYTES, np.uint8)
        return own(self.comm.Irecv(buffer, runtime.mpi().ANY_SOURCE, self.questions)), buffer

    def close(self) -> None:
        """Take back the receives that are posted; questions are read no more."""
        posted, self._posted = self._posted, deque()
        with suppress(Exception):  # of MPI where a peer has died
            for request, _ in posted:
                request.Cancel()
                request.Test()

    def send(self, peers: Iterable[int], kind: Kind, inquiry: tuple[int, int], content: Any = None) -> None:
        """Start sending to ranks of this communicator."""
        data = np.frombuffer(pickle.dumps((kind, inquiry, content)), np.uint8)
        self._sending = [request for request in self._sending if not request.Test()]
        tag = self.tag if kind in (Kind.QUIET, Kind.DUMP) else self.questions
        self._sending += [own(self.comm.Isend(data, peer, tag)) for peer in peers]

    def read(self) -> list[Letter]:
        """All messages that have arrived."""
        found = []
        while self._posted and self._posted[0][0].Test(self._status):
            _, buffer = self._posted.popleft()
            self._posted.append(self._post())
            found.append(Letter(self._status.Get_source(), *pickle.loads(buffer[: self._status.Get_count()].tobytes())))
        while self._receiving is not None or self.comm.Iprobe(tag=self.tag, status=self._status):
            if self._receiving is None:
                source = self._status.Get_source()
                buffer = np.empty(self._status.Get_count(), np.uint8)
                self._receiving = own(self.comm.Irecv(buffer, source, self.tag)), buffer, source
            request, buffer, source = self._receiving
            if not request.Test():
                break
            self._receiving = None
            found.append(Letter(source, *pickle.loads(buffer.tobytes())))
        self._sending = [request for request in self._sending if not request.Test()]
        return found


def threads_allowed() -> bool:
    """Whether MPI takes calls from several threads at once."""
    MPI = runtime.mpi()
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def open_channel(comm: MpiCommunicator, members: tuple[int, ...], threaded: bool) -> Channel:
    """The channel of the ranks of `comm`, on a duplicate; collective."""
    private = communicators.duplicate(comm)
    private.Set_name("mpipipe watchdog")
    row, table = np.zeros(24 + HOST_BYTES, np.uint8), np.empty((comm.size, 24 + HOST_BYTES), np.uint8)
    row[:24].view(np.int64)[:] = os.getpid(), threaded, offer_stacks()
    host = np.frombuffer(socket.gethostname().encode()[:HOST_BYTES], np.uint8)
    row[24 : 24 + host.size] = host
    wait_for_ranks(own(private.Iallgather(row, table)), "the hosts of all ranks", members)
    return Channel(private, members, [_place(line) for line in table])


def world_channel(world: MpiCommunicator) -> Channel:
    """The channel of all ranks of COMM_WORLD that have come so far, which may be this one alone; not collective."""
    unknown = Place("", 0, True, -1)
    largest: int = world.Get_attr(runtime.mpi().TAG_UB)  # type: ignore[assignment]  # MPI always has it on COMM_WORLD
    tag = largest - BELOW
    return Channel(world, tuple(range(world.size)), [unknown] * world.size, tag, tag - 1)


def _place(row: np.ndarray) -> Place:
    pid, threaded, descriptor = row[:24].view(np.int64).tolist()
    return Place(row[24:].tobytes().rstrip(b"\0").decode("utf-8", "replace"), pid, bool(threaded), descriptor)
