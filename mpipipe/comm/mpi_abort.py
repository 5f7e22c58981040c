"""The end of a whole job at once, by MPI_Abort, which does not end every process that calls it."""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

from mpipipe.comm.process import Process, here
from mpipipe.comm.report import wait_for_launcher
from mpipipe.comm.types import MpiCommunicator


def abort_job(world: MpiCommunicator, code: int, process: Process | None = None) -> NoReturn:
    """End the job: by the lifeline where this rank (`process`, by default the calling one) has one, else by MPI_Abort.

    The main thread first waits until the launcher has read what was written, and no Ctrl-C keeps it from the end. Any
    other thread ends the job at once, for the program would go on meanwhile.

    `world` is COMM_WORLD, no duplicate of it: on a duplicate MPICH ends one rank after the other, and its launcher may
    return 0 then, as if the job had been a success.

    MPICH's MPI_Abort returns under `srun --mpi=pmi2`, and was seen to do so under its own launcher on a busy machine.
    This process then ends by a signal.
    """
    line = (here() if process is None else process).lifeline
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            wait_for_launcher()
    finally:
        if line is not None:
            line.end_job(code)
        world.Abort(code)
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(code)  # the signal comes first
