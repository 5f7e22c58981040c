"""The environment of an MPI job that a rank of another job starts.

A process that inherits what a launcher told its parent believes that it belongs to the parent's job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# What launchers tell each process about its job, as beginnings of variables. Settings of a user's, such as
# OMPI_MCA_pml, and what SLURM tells about an allocation, such as SLURM_JOB_ID, are not among them.
LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_",
    "OMPI_UNIVERSE",
    "OMPI_APP_CTX",
    "OMPI_FIRST_RANKS",
    "OMPI_FILE_LOCATION",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_pmix",
    "PRTE_LAUNCHED",
    "HYDI_",
    "HYDRA_",
    "MPI_LOCAL",
    "MPIEXEC_",
    "MV2_COMM_",
    "FLUX_TASK_",
    "PALS_",
    "SLURM_STEP",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_TASK_PID",
    "SLURM_GTIDS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_SRUN_COMM",
    "SLURM_LAUNCH_NODE",
    "SLURM_UMASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_MPI_TYPE",
)
# Several ranks on one small host. Each of these is read by one MPI, and ignored by the others.
ONE_HOST = {
    "HYDRA_LAUNCHER": "fork",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def environment_of_own_job(environment: Mapping[str, str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return `environment` without what launchers told this process, for a job on this host.

    Parameters
    ----------
    environment : of this process
    prefixes : beginnings of more variables to leave out
    """
    left_out = (*LAUNCHER_PREFIXES, *prefixes)
    kept = {name: value for name, value in environment.items() if not name.startswith(left_out)}
    return {**ONE_HOST, **kept, **(AS_ROOT if os.geteuid() == 0 else {})}
