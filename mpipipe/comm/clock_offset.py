r"""How far the clock of rank 0 is ahead of this rank's: messages to and fro, of which the fastest counts.

    rank 0    ------- t0 -------
                     /  \
    rank r    ----- a    b -----      the clock of rank 0 shows t0 at some time between a and b of this rank

So t0 - (a + b) / 2 is off by at most (b - a) / 2, however unlike the two ways are. The smallest b - a of many is taken
(Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpipipe.comm.group import Group
from mpipipe.comm.requests import own
from mpipipe.comm.types import Communicator

ROUNDS = 50
WHAT = "the clock of rank 0"


class Offset(NamedTuple):
    """A comparison with the clock of rank 0, in seconds.

    Attributes
    ----------
    at : when it was, by this rank's clock
    ahead : the clock of rank 0 less this rank's
    error : how far `ahead` may be off
    """

    at: float
    ahead: float
    error: float


def clock_offset(group: Group, comm: Communicator, now: Callable[[], float]) -> Offset:
    """Compare this rank's clock with that of rank 0; collective.

    Parameters
    ----------
    group : the ranks
    comm : a communicator of the same ranks, on which no other messages are under way
    now : this rank's clock, in seconds
    """
    group.agree("comparing clocks")
    with group.failing("comparing clocks"):
        if comm.rank > 0:
            return min((_ask(group, comm, now) for _ in range(ROUNDS)), key=lambda offset: offset.error)
        for peer in range(1, comm.size):
            for _ in range(ROUNDS):
                _answer(group, comm, now, peer)
    return Offset(now(), 0.0, 0.0)


def _ask(group: Group, comm: Communicator, now: Callable[[], float]) -> Offset:
    answer = np.empty(1)
    receive = own(comm.Irecv(answer, 0, 0))
    before = now()
    send = own(comm.Isend(np.zeros(1), 0, 0))
    group.wait(receive, WHAT, peer=0)
    after = now()
    group.wait(send, WHAT, peer=0)
    return Offset((before + after) / 2, float(answer[0]) - (before + after) / 2, (after - before) / 2)


def _answer(group: Group, comm: Communicator, now: Callable[[], float], peer: int) -> None:
    group.wait(own(comm.Irecv(np.empty(1), peer, 0)), f"rank {peer}, to compare clocks", peer=peer)
    group.wait(own(comm.Isend(np.array([now()]), peer, 0)), f"rank {peer}, to compare clocks", peer=peer)
