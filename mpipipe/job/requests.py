"""The owner of MPI requests: memory that MPI may still touch outlives everybody who drops it.

Without it, a wait raises, the request goes out of scope, Python frees its buffer while a message is
still on its way into it, and MPI writes into memory that belongs to somebody else. So every request
goes through `own`: one that loses its last reference before it is complete is kept for the rest of
the process, and its buffers with it. A list in this module could not do that: Python clears the
globals of modules before mpi4py finalizes MPI, and MPI still moves messages in between. So the
request gets one more reference that nothing ever gives back.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import TypeVar

AnyRequest = TypeVar("AnyRequest")


def own(request: AnyRequest, *buffers: object) -> AnyRequest:
    """`request`, which from now on keeps itself and `buffers` alive until it tests true.

    It holds the buffers that mpi4py was given; `buffers` are owners of memory that mpi4py knows
    only by its address, such as device arrays. Requests that are not of MPI come back as they are.
    """
    if "mpi4py.MPI" not in sys.modules:  # ranks in one process need no MPI, and must not load it
        return request
    plain, owning = _types()
    if not isinstance(request, plain):
        return request
    owned = owning(request)
    if buffers:
        owned.buffers = buffers
    return owned


def keep_forever(
    thing: object,
    _increment: Callable[[object], None] = ctypes.pythonapi.Py_IncRef,
    _object: Callable[[object], object] = ctypes.py_object,
) -> None:
    """Never free `thing`, not even when the interpreter ends."""
    _increment(_object(thing))  # arguments, since the names of this module are gone by the end


@cache
def _types() -> tuple[type, type]:
    """The class of MPI's requests, and that of owned ones, once MPI is loaded."""
    from mpi4py import MPI

    class Owned(MPI.Request):
        """A request that cannot be dropped too early."""

        __slots__ = ("buffers",)

        def Cancel(self) -> None:
            """Withdraw a receive; where MPI agrees, the request is complete."""
            if self and not self.Test():
                super().Cancel()
                self.Test()

        def __del__(self, keep_forever: Callable[[object], None] = keep_forever) -> None:
            if self:  # not MPI.REQUEST_NULL: MPI has not said that it is complete
                keep_forever(self)

    return MPI.Request, Owned
