"""In a script that was started without `run_or_abort`: an exception on one rank ends the whole job.

This is the least that is needed. The rank that dies of an exception reports it as Python does, gives its peers some
seconds to say where they were, and calls MPI_Abort.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mpipipe.comm import exit_hooks
from mpipipe.comm.mpi_abort import abort_job
from mpipipe.comm.report import GRACE, INTERRUPTED, STAGGER, write

_hooked: list[Callable[..., Any]] = []  # the hook that was there before ours
_deaths: list[BaseException] = []  # what ended the script
_suspended: list[bool] = []  # while run_or_abort runs a program


def install(MPI: ModuleType) -> None:
    """From now on an exception that ends this rank's script ends the whole job, some seconds later, by MPI_Abort.

    Nothing happens in an interactive session, and in a program that `run_or_abort` runs.
    """
    if _hooked:
        return
    previous = sys.excepthook
    _hooked.append(previous)

    def report_and_remember(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        if not _suspended and not sys.flags.interactive and "ps1" not in vars(sys):
            _deaths.append(error)

    sys.excepthook = report_and_remember
    exit_hooks.call_last(lambda: _abort_after_exception(MPI))
    # MPI_Finalize, should the script call it, begins with what is attached to COMM_SELF
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: exit_hooks.before_finalize())
    MPI.COMM_SELF.Set_attr(keyval, True)


@contextmanager
def suspended() -> Iterator[None]:
    """Leave exceptions alone within: `run_or_abort` deals with them."""
    _suspended.append(True)
    try:
        yield
    finally:
        _suspended.pop()


def _abort_after_exception(MPI: ModuleType) -> None:
    if not _deaths or MPI.Is_finalized():
        return
    error, rank = _deaths[0], MPI.COMM_WORLD.rank
    sys.stdout.flush()
    sys.stderr.flush()
    # peers that hear of it have time to say where they were; one that only heard leaves the end to the one it heard of
    heard = getattr(error, "reported_elsewhere", False)
    time.sleep(2 * GRACE + STAGGER * rank if heard else 1.0 + min(1.0, 0.05 * rank))
    write(f"mpipipe: rank {rank} of {MPI.COMM_WORLD.size} died of {type(error).__name__}: the job ends here\n")
    code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    abort_job(MPI.COMM_WORLD, code)
