"""What commands have in common that work on paper, in one process and without MPI."""

from __future__ import annotations

import os

from mpipipe.comm import launcher
from mpipipe.errors import ConfigError
from mpipipe.wording import counted


def check_one_process(command: str) -> None:
    """Refuse a start by mpiexec or srun: each rank would do the whole work, and write the same file."""
    started = launcher.launcher_size(os.environ)
    if started is not None:
        raise ConfigError(
            f"{command} is for one process",
            found=counted(started[1], "rank"),
            remedy="start it without mpiexec or srun",
        )
