"""Making communicators, without a rank that waits inside MPI for others which may never come.

This is the one module with calls of MPI that block: a split has no other form. The ranks must have
agreed just before, so that all of them are on their way into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from mpipipe.errors import MpipipeError
from mpipipe.job import runtime
from mpipipe.job.context import current_rank, whoami
from mpipipe.job.requests import own
from mpipipe.job.threads import ThreadCommunicator
from mpipipe.job.types import Communicator, GroupName, Ranks
from mpipipe.job.wait import wait_for_ranks

Item = TypeVar("Item")
ARRIVAL_SECONDS = 3.0  # for messages that a rank has sent before it left


def make(comm: Communicator, covered: bool = True) -> tuple[Communicator, GroupName, bool]:
    """Make a duplicate of `comm`; collective, and never inside MPI for long.

    When it returns, every rank has its own: so no rank that leaves afterwards can be missed here.
    `covered` says whether the watchdog of this rank needs no new channel to the others. Returns
    the duplicate, a name of it that is the same on all ranks, and whether none needs one.
    """
    members = world_ranks(comm)
    makings = current_rank().makings
    name = (crc32(repr(members).encode()),)
    makings[name] += 1
    new, request = comm.Idup()
    what = f"all {comm.size} ranks of a communicator to make one like it"
    wait_for_ranks(own(request), what, members, meeting=(name, makings[name]))
    row = np.array([makings[name], covered], np.int64)
    table = np.empty((comm.size, row.size), row.dtype)
    request = own(new.Iallgather(row, table))
    wait_for_ranks(request, "all ranks of a new communicator", members, grace=ARRIVAL_SECONDS)
    # Where a making has failed, not all ranks have begun it: they count alike again from here.
    makings[name] = int(table[:, 0].max())
    return new, (*name, makings[name]), bool(table[:, 1].all())


def duplicate(comm: Communicator) -> Communicator:
    """Return a duplicate of `comm`; collective, and never inside MPI for long."""
    return make(comm)[0]


def world_ranks(comm: Communicator) -> Ranks:
    """Return the rank in COMM_WORLD of each rank of `comm`; -1 for what is no part of it."""
    if runtime.in_process(comm):
        return comm.members
    MPI = runtime.mpi()
    group = MPI.Comm.Get_group(comm)
    world = MPI.COMM_WORLD.Get_group()
    try:
        ranks = []
        for rank in MPI.Group.Translate_ranks(group, None, world):
            if rank == MPI.UNDEFINED:
                rank = -1
            ranks.append(int(rank))
        return tuple(ranks)
    finally:
        group.Free()
        world.Free()


def split(comm: Communicator, color: int, key: int) -> Communicator:
    """Return the ranks with this `color`, by `key`; call it right after an agreement."""
    return comm.Split(color, key)


def rank_on_host(comm: Communicator) -> int:
    """Return the place of this rank on its host; call it right after an agreement."""
    if isinstance(comm, ThreadCommunicator):
        return comm.rank
    node = comm.Split_type(runtime.mpi().COMM_TYPE_SHARED)
    try:
        return node.rank
    finally:
        node.Free()


# -- Objects that belong to a user's communicator: made once, closed when it is freed --------------
#
# MPI calls this attribute caching. This package has one key; its value is a dict of what belongs to
# the communicator.


logger = logging.getLogger("mpipipe")


_keyvals: list[int] = []  # the first one for all, although threads may come here at once


def cached(comm: Communicator, key: Hashable, make: Callable[[], Item]) -> Item:
    """Return `make()` on the first call with this `key` on `comm`, the same object later.

    `make` may be collective.
    """
    items = attributes(comm)
    if key not in items:
        items[key] = make()
    item: Item = items[key]
    return item


def attributes(comm: Communicator) -> dict[Hashable, Any]:
    """Return what this package keeps on `comm`: key -> object with a method `close`."""
    if isinstance(comm, ThreadCommunicator):
        return comm.items
    if not _keyvals:
        _keyvals.append(runtime.mpi().Comm.Create_keyval(delete_fn=_close_all))
    items: Any = comm.Get_attr(_keyvals[0])
    if items is None:
        items = {}
        comm.Set_attr(_keyvals[0], items)
    return items


def _close_all(comm: Communicator, _key: int, items: dict[Hashable, Any]) -> None:
    """Close what belongs to a communicator that is freed; both are collective.

    COMM_WORLD is never freed: MPI_Finalize deletes its attributes, and nothing can be closed any
    more.
    """
    if comm == runtime.mpi().COMM_WORLD:
        return
    for item in reversed(items.values()):  # the group, in which the others were made, last
        try:
            item.close()
        except MpipipeError as error:  # out of a callback of MPI it could not be caught
            logger.warning("%s: a communicator could not be freed: %s", whoami(), error)
