"""The end of a whole job at once, by MPI_Abort, which does not end every process that calls it."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from mpipipe.comm.process import Process, here
from mpipipe.comm.report import wait_for_launcher
from mpipipe.comm.types import MpiCommunicator


def abort_job(comm: MpiCommunicator, code: int, process: Process | None = None) -> NoReturn:
    """End the job: by the lifeline where this rank (`process`, by default the calling one) has one, else by MPI_Abort.

    What was written before is shown, and no Ctrl-C stops this function.

    MPICH's MPI_Abort returns under `srun --mpi=pmi2`, and was seen to do so under its own launcher on a busy machine.
    This process then ends by a signal.
    """
    line = (here() if process is None else process).lifeline
    try:
        wait_for_launcher()
    finally:
        if line is not None:
            line.end_job(code)
        comm.Abort(code)
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(code)  # the signal comes first
