"""Making communicators, without a rank that waits inside MPI for others which may never come.

This is the one module with calls of MPI that block: a split has no other form. The ranks must have agreed just before,
so that all of them are on their way into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import numpy as np

from mpipipe.errors import MpipipeError
from mpipipe.job import runtime
from mpipipe.job.requests import own
from mpipipe.job.types import AnyCommunicator, Communicator
from mpipipe.job.wait import wait_for_ranks

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


# -- Objects that belong to a user's communicator: made once, and closed when that communicator is freed --------------
#
# MPI calls this attribute caching: a communicator keeps values under keys, and calls a function for each when it is
# freed. This package has one key; its value is a dict of everything that belongs to the communicator.


logger = logging.getLogger("mpipipe")
_keyvals: dict[ModuleType, int] = {}  # for MPI, and for ranks in one process


def cached(comm: Communicator, key: Hashable, make: Callable[[], Any]) -> Any:
    """`make()` on the first call with this `key` on `comm`, the same object later. `make` may be collective."""
    kept = attributes(comm)
    if key not in kept:
        kept[key] = make()
    return kept[key]


def attributes(comm: Communicator) -> dict[Hashable, Any]:
    """What this package keeps on `comm`: key -> object with a method `close`."""
    library = runtime.library_of(comm)
    keyval = _keyvals.get(library)
    if keyval is None:  # one key for all, although threads may come here at once
        keyval = _keyvals.setdefault(library, library.Comm.Create_keyval(delete_fn=_close_all))
    kept = comm.Get_attr(keyval)
    if kept is None:
        kept = {}
        comm.Set_attr(keyval, kept)
    return kept


def _close_all(comm: Communicator, _keyval: int, kept: dict[Hashable, Any]) -> None:
    """Freeing a communicator is collective, and so is closing what belongs to it.

    COMM_WORLD is never freed: MPI_Finalize deletes its attributes, and nothing can be closed any more.
    """
    if comm == runtime.library_of(comm).COMM_WORLD:
        return
    for item in reversed(kept.values()):  # the group, in which the others were made, last
        try:
            item.close()
        except MpipipeError as error:  # in a callback of MPI nobody could catch it
            logger.warning("%s: a communicator could not be freed: %s", runtime.whoami(), error)
