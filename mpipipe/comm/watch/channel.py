"""Messages between the watchdogs of several ranks, on a communicator of their own. Nothing here ever waits."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from mpipipe.comm import communicators, runtime
from mpipipe.comm.requests import own
from mpipipe.comm.types import MpiCommunicator, Request
from mpipipe.comm.wait import wait_for_ranks
from mpipipe.comm.watch.neighbours import offer_stacks

HOST_BYTES = 40


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
    """Where a rank runs, whether its watchdog answers while it computes, and where its stacks can be read."""

    host: str
    pid: int
    threaded: bool
    descriptor: int  # see neighbours.offer_stacks


class Channel:
    """The watchdogs of the ranks of one communicator; the constructor is collective.

    Attributes
    ----------
    members : tuple of int
        Rank in COMM_WORLD of each rank.
    places : list of Place
        Of each rank.
    """

    def __init__(self, comm: MpiCommunicator, members: tuple[int, ...], threaded: bool) -> None:
        self.comm, self.members = communicators.duplicate(comm), members
        self.comm.Set_name("mpipipe watchdog")
        self.rank, self.size = comm.rank, comm.size
        self._status = runtime.mpi().Status()
        self._sending: list[Request] = []
        self._receiving: tuple[Request, np.ndarray, int] | None = None
        row, table = np.zeros(24 + HOST_BYTES, np.uint8), np.empty((self.size, 24 + HOST_BYTES), np.uint8)
        row[:24].view(np.int64)[:] = os.getpid(), threaded, offer_stacks()
        host = np.frombuffer(socket.gethostname().encode()[:HOST_BYTES], np.uint8)
        row[24 : 24 + host.size] = host
        wait_for_ranks(own(self.comm.Iallgather(row, table)), "the hosts of all ranks", members)
        self.places = [_place(line) for line in table]

    def send(self, peers: Iterable[int], kind: Kind, inquiry: tuple[int, int], content: Any = None) -> None:
        """Start sending to ranks of this communicator."""
        data = np.frombuffer(pickle.dumps((kind, inquiry, content)), np.uint8)
        self._sending = [request for request in self._sending if not request.Test()]
        self._sending += [own(self.comm.Isend(data, peer, 0)) for peer in peers]

    def read(self) -> list[Letter]:
        """All messages that have arrived."""
        found = []
        while self._receiving is not None or self.comm.Iprobe(status=self._status):
            if self._receiving is None:
                source = self._status.Get_source()
                buffer = np.empty(self._status.Get_count(), np.uint8)
                self._receiving = own(self.comm.Irecv(buffer, source, 0)), buffer, source
            request, buffer, source = self._receiving
            if not request.Test():
                break
            self._receiving = None
            found.append(Letter(source, *pickle.loads(buffer.tobytes())))
        self._sending = [request for request in self._sending if not request.Test()]
        return found


def _place(row: np.ndarray) -> Place:
    pid, threaded, descriptor = row[:24].view(np.int64).tolist()
    return Place(row[24:].tobytes().rstrip(b"\0").decode("utf-8", "replace"), pid, bool(threaded), descriptor)
