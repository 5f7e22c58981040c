"""Making communicators, without a rank that waits inside MPI for others which may never come.

This is the one module with calls of MPI that block: a split has no other form. The ranks must have agreed just before,
so that all of them are on their way into it.
"""

from __future__ import annotations

import numpy as np

from mpipipe.comm import runtime
from mpipipe.comm.requests import own
from mpipipe.comm.types import AnyCommunicator, Communicator
from mpipipe.comm.wait import wait_for_ranks

ARRIVAL_SECONDS = 3.0  # for messages that a rank has sent before it left


def duplicate(comm: AnyCommunicator) -> AnyCommunicator:
    """A duplicate of `comm`; collective, and never inside MPI for long.

    When it returns, every rank has its own: so whoever leaves afterwards cannot be missed here.
    """
    new, request = comm.Idup()
    wait_for_ranks(own(request), f"all {comm.size} ranks of a communicator to make one like it", world_ranks(comm))
    if new.size > 1:
        mine, table = np.zeros(1, np.int64), np.empty(new.size, np.int64)
        request = own(new.Iallgather(mine, table))
        wait_for_ranks(request, "all ranks of a new communicator", world_ranks(comm), grace=ARRIVAL_SECONDS)
    return new


def world_ranks(comm: Communicator) -> tuple[int, ...]:
    """The rank in COMM_WORLD of each rank of `comm`; -1 for what is no part of it."""
    if runtime.in_process(comm):
        return comm.members
    MPI = runtime.mpi()
    group, world = MPI.Comm.Get_group(comm), MPI.COMM_WORLD.Get_group()
    try:
        ranks = MPI.Group.Translate_ranks(group, None, world)
        return tuple(-1 if rank == MPI.UNDEFINED else int(rank) for rank in ranks)
    finally:
        group.Free()
        world.Free()


def split(comm: Communicator, color: int, key: int, name: str) -> Communicator:
    """The part of a private communicator with this `color`, ordered by `key`; call it right behind an agreement."""
    part = comm.Split(color, key)
    part.Set_name(f"mpipipe {name}")
    return part


def rank_on_host(comm: Communicator) -> int:
    """Position of this rank among those of a private communicator on its host; call it right behind an agreement."""
    node = comm.Split_type(runtime.library_of(comm).COMM_TYPE_SHARED)
    try:
        return node.rank
    finally:
        node.Free()
