"""Objects that belong to a user's communicator: made once, and closed when that communicator is freed."""

from __future__ import annotations

from mpipipe.comm import runtime

_keyvals: list[int] = []


def private(comm, key, make):
    """`make()` on the first call with this `key` on `comm`, the same object later. `make` may be collective."""
    store = _store(comm)
    if key not in store:
        store[key] = make()
    return store[key]


def _store(comm) -> dict:
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


def _close_all(_comm, _keyval, store):
    """Freeing a communicator is collective, and so is closing what belongs to it."""
    for item in store.values():
        item.close()
