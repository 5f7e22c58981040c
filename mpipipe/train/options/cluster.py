"""Options of a training: what keeps a training safe on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.train.options.option import option


@dataclass(frozen=True)
class ClusterOptions:
    """What keeps a training safe on a cluster."""

    preempt_signals: str = option(
        "USR2,TERM",
        "signals at which a checkpoint is saved and all ranks leave with exit code 75; none: no such signal",
    )
    preempt_grace: float = option(
        600.0, "seconds from such a signal until the job ends at once, saved or not; inf for no limit", least=0
    )
    time_limit: str | None = option(
        None,
        "seconds or HH:MM:SS that the job may last; it saves before and leaves with 75; 0: no limit; default: what "
        "SLURM gives the job",
    )
    check_weights: int = option(
        0, "steps between two comparisons of parameters and optimizer state over replicas; 0: none", least=0
    )
    watchdog: float | None = option(
        None, "seconds without progress until a hang is reported; 0: never; default: MPIPIPE_WATCHDOG or 600", least=0
    )
    survive: bool = option(
        False, "go on with fewer replicas when ranks die: needs `mpiexec --with-ft ulfm` of Open MPI 5"
    )
