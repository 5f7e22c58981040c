"""Objects that belong to a user's communicator: made once, and closed when that communicator is freed.

MPI calls this attribute caching.
"""

from __future__ import annotations

import logging

from mpipipe.comm import runtime
from mpipipe.errors import MpipipeError

logger = logging.getLogger("mpipipe")
_keyvals: list[int] = []


def cached(comm, key, make):
    """`make()` on the first call with this `key` on `comm`, the same object later. `make` may be collective."""
    store = attributes(comm)
    if key not in store:
        store[key] = make()
    return store[key]


def attributes(comm) -> dict:
    """What this package keeps on `comm`: key -> object with a method `close`."""
    if hasattr(comm, "store"):  # ranks in one process
        return comm.store
    MPI = runtime.mpi()
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_close_all))
    store = comm.Get_attr(_keyvals[0])
    if store is None:
        store = {}
        comm.Set_attr(_keyvals[0], store)
    return store


def _close_all(comm, _keyval, store):
    """Freeing a communicator is collective, and so is closing what belongs to it.

    COMM_WORLD is never freed: MPI_Finalize deletes its attributes, and nothing can be closed any more.
    """
    if comm == runtime.mpi().COMM_WORLD:
        return
    for item in reversed(store.values()):  # the group, in which the others were made, last
        try:
            item.close()
        except MpipipeError as error:  # in a callback of MPI nobody could catch it
            logger.warning("%s: a communicator could not be freed: %s", runtime.whoami(), error)
