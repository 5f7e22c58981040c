"""MPI as this job finds it, in words."""

from __future__ import annotations

import os

from mpipipe import arrays
from mpipipe.comm.nccl.channel import agree_on_nccl
from mpipipe.comm.transport import gpu_aware
from mpipipe.errors import BackendError
from mpipipe.job import Communicator, RankGroup, group_of, launcher_size, mpi, tag_upper_bound
from mpipipe.text import counted


def describe() -> dict[str, str]:
    """Describe MPI for `python -m mpipipe info`; collective. Raises BackendError without MPI."""
    library = mpi_library()
    comm = mpi().COMM_WORLD
    import mpi4py

    launcher = "none seen"
    promise = launcher_size(os.environ)
    if promise is not None:
        launcher = f"promises {counted(promise[1], 'rank')} ({promise[0]})"
    awareness = "no GPU"
    if _has_gpus(group_of(comm)):
        awareness = str(gpu_aware.detect(comm))
    return {
        "MPI": library["library"],
        "MPI standard": library["standard"],
        "mpi4py": mpi4py.__version__,
        "ranks": str(comm.size),
        "launcher": launcher,
        "thread level": library["thread_level"],
        "largest tag": str(tag_upper_bound(comm)),
        "GPU-aware MPI": awareness,
    }


def mpi_library() -> dict[str, str]:
    """The MPI library, and the level of threads that it grants this process.

    Raises BackendError without MPI.
    """
    MPI = mpi()
    levels: dict[int, str] = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\x00").split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": levels[MPI.Query_thread()],
    }


def nccl(comm: Communicator) -> str:
    """Say what NCCL would carry between the ranks of `comm`, and why; collective."""
    group = group_of(comm)
    if not _has_gpus(group):
        return "no GPU"
    device = "cpu"
    if arrays.device_count():
        device = "cuda"
    try:
        return str(agree_on_nccl([group], device))
    except BackendError as error:
        return str(error)


def _has_gpus(group: RankGroup) -> bool:
    """Return whether any rank sees a GPU; collective."""
    return bool(group.agree("info: the GPUs", values=[arrays.device_count()]).any())
