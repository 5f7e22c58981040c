"""What the launcher of a job tells each of its processes, in environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpipipe.errors import LaunchError

# Where launchers say how many ranks the job has, which of them a process is, and how many are on its host.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "SLURM_PROCID")
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def launcher_size(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """(variable, ranks) where a launcher promises this process more than one rank, else None."""
    for name in SIZE_VARIABLES:
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 1:
            return name, int(value)
    return None


def launcher_rank(environment: Mapping[str, str]) -> int:
    """The rank that a launcher promises this process; 0 without a launcher."""
    ranks = [environment.get(name, "") for name in RANK_VARIABLES]
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def oversubscribed() -> bool:
    """Whether the launcher put more ranks on this host than it has cores."""
    sizes = [os.environ.get(name, "") for name in LOCAL_SIZE_VARIABLES]
    return max((int(size) for size in sizes if size.isdigit()), default=1) > (os.cpu_count() or 1)


def refuse_singleton(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if a launcher promised several ranks; for a process that is alone in COMM_WORLD."""
    promise = launcher_size(environment)
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
