"""Objects that belong to a user's communicator: made once, and closed when that communicator is freed.

MPI calls this attribute caching: a communicator keeps values under keys, and calls a function for each when it is
freed. This package has one key; its value is a dict of everything that belongs to the communicator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

from mpipipe.comm import runtime
from mpipipe.comm.types import Communicator
from mpipipe.errors import MpipipeError

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
