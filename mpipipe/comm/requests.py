"""The owner of MPI requests: memory that MPI may still touch outlives everybody who forgets it.

A request that is dropped before it is complete, because a wait raised for example, would free its buffers while a
message is still on its way into them. `own` makes that impossible: an incomplete request that loses its last reference
is kept for the rest of the process, and its buffers with it. Python clears module globals before mpi4py finalizes MPI,
which still moves messages, so what is kept has a reference that nothing ever gives back.
"""

from __future__ import annotations

import ctypes
import sys

_types: list[type] = []


def own(request, *buffers):
    """`request`, which from now on keeps itself and `buffers` alive until it tests true.

    Parameters
    ----------
    request : what a non-blocking MPI call returned; it holds the buffers that mpi4py was given. Requests of ranks that
        are threads of one process come back as they are.
    buffers : owners of memory that mpi4py knows by its address only, such as device arrays
    """
    if "mpi4py.MPI" not in sys.modules:  # ranks in one process need no MPI, and must not load it
        return request
    kind = _owned()
    if not isinstance(request, kind.__base__):
        return request
    owned = kind(request)
    if buffers:
        owned.buffers = buffers
    return owned


def _owned() -> type:
    if not _types:
        _types.append(_make_type())
    return _types[0]


def keep_forever(thing, _increment=ctypes.pythonapi.Py_IncRef, _object=ctypes.py_object):
    """Never free `thing`, not even when the interpreter ends."""
    _increment(_object(thing))


def _make_type() -> type:
    from mpi4py import MPI

    class Owned(MPI.Request):
        """A request that nobody can drop too early."""

        __slots__ = ("buffers",)

        def Cancel(self):
            """Withdraw a receive; where MPI agrees, the request is complete."""
            if self and not self.Test():
                super().Cancel()
                self.Test()

        def __del__(self, keep_forever=keep_forever):
            if self:  # not MPI.REQUEST_NULL: MPI has not said that it is complete
                keep_forever(self)

    return Owned
