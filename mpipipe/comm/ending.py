"""How all ranks of a job end together: what each has to report, who speaks, and the exit code of all.

    rank 0   main() returned     [code 0, NOTHING]              |
    rank 1   ValueError          [code 1, CAUSE]                |  one all-gather -> rank 1 reports, all leave with 1
    rank 2   PeerError of it     [code 1, REPORTED_ELSEWHERE]   |

A rank without an error waits for that all-gather as long as it takes. One with an error waits for some seconds, then
writes its report and ends the job by MPI_Abort.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mpipipe import ended
from mpipipe.comm import exit_hooks, lifeline, rank_list, runtime
from mpipipe.comm.group import Group
from mpipipe.comm.mpi_abort import abort_job
from mpipipe.comm.process import here
from mpipipe.comm.report import AGREED, GRACE, INTERRUPTED, STAGGER, heading, write
from mpipipe.comm.requests import own
from mpipipe.comm.types import MpiCommunicator, Request
from mpipipe.errors import LostRankError

QUIET = 0.2  # seconds that a rank without an error waits for its peers before it tells them that it has left
FINALIZE = 20.0  # seconds for MPI_Finalize after an error
PAUSE = 2e-3


class Says(IntEnum):
    """What a rank has to report at its end; where ranks differ, the highest one speaks."""

    NOTHING = 0
    REPORTED_ELSEWHERE = 1  # an error that another rank reports
    EXITED = 2  # that it has left with a code
    CAUSE = 3  # an error of its own


class End(NamedTuple):
    """How the program of one rank ended.

    Attributes
    ----------
    code : int
        Its exit code.
    says : Says
    report : str
        The text to write, if it is this rank that speaks.
    refusal : int
        A number made of the text of an error of this package, where that is no failure of a computation; else 0. Ranks
        that refuse the same thing have the same number.
    """

    code: int
    says: Says = Says.NOTHING
    report: str = ""
    refusal: int = 0


class World(NamedTuple):
    """All ranks of the job: their group, and a communicator for nothing but their end."""

    group: Group
    end: MpiCommunicator
    rank: int
    size: int


def leave_together(world: World, end: End) -> int:
    """Wait for all ranks to end; one that ends with an error does not wait for long."""
    if runtime.finalized(world.end):
        if end.report and end.code:
            write(end.report)
        if end.code == 0 and world.rank == 0:  # MPI_Finalize is collective: no rank was missing
            _prove()
        return end.code
    try:
        table = _all_ends(world, end)
    except LostRankError as error:  # a job that was done stays done
        if end.says == Says.CAUSE:
            write(end.report)
        elif end.code and world.rank == here().lifeline.lowest():
            write(f"{heading(world.rank, world.size)}\n  {type(error).__name__}: {error}\n")
        elif end.code:
            here().lifeline.let_leave_first(here().lifeline.lowest(), GRACE)
        elif world.rank == here().lifeline.lowest():
            _prove()
        lifeline.leave(end.code)
    except KeyboardInterrupt:
        write(f"{heading(world.rank, world.size)}\n  KeyboardInterrupt while it waited for the other ranks to end\n")
        abort_job(runtime.world(), INTERRUPTED)
    outlived = here().lifeline is not None and bool(here().lifeline.lost)
    codes, says, refusals = (column.tolist() for column in table.T)
    if len(set(codes)) == 1 and says[0] in (Says.NOTHING, Says.EXITED) and len(set(says)) == 1:
        if codes[0] == 0 and world.rank == 0:
            _prove()
        if outlived:
            lifeline.leave(codes[0])
        return codes[0]
    speaker = says.index(max(says))
    if max(says) == Says.EXITED and Says.REPORTED_ELSEWHERE not in says:
        listing = "; ".join(rank_list.grouped((rank, str(each)) for rank, each in enumerate(codes)))
        report, code = f"mpipipe: ranks left with different exit codes ({listing})\n", max(codes)
    else:
        alike = refusals[0] != 0 and len(set(refusals)) == 1
        report, code = end.report, AGREED if alike else codes[speaker]
    if world.rank == speaker:
        write(report)
    if outlived:
        lifeline.leave(code)
    _finalize(code)
    return code


def _prove() -> None:
    """Leave the proof that this job has ended well, for whoever waits for one."""
    try:
        ended.end()
    except OSError as error:
        write(f"mpipipe: the proof of this job's end cannot be written: {error.strerror}\n")


def _all_ends(world: World, end: End) -> np.ndarray:
    """Rows of (exit code, Says, refusal), one for each rank; aborts where that takes too long after an error."""
    here().ended = True
    table = np.zeros((world.size, 3), np.int64)
    request = own(world.end.Iallgather(np.array([end.code, end.says, end.refusal], np.int64), table))
    start, told = time.monotonic(), False
    line = here().lifeline
    while not _is_complete(request, line):
        waited = time.monotonic() - start
        if not told and (end.code or waited > QUIET):
            told = True
            exit_hooks.say_farewell()
        if end.code and waited > _patience(world, end):
            write(end.report)
            abort_job(runtime.world(), end.code)
        time.sleep(PAUSE)
    return table


def _is_complete(request: Request, line: lifeline.Lifeline | None) -> bool:
    """Test a request; raises LostRankError if it cannot be completed, since a rank has died."""
    if line is None:
        return request.Test()
    try:
        line.look()
        return request.Test()
    except Exception as error:
        if line.explains(error):
            raise LostRankError(line.name(line.dead()) or str(error)) from error
        raise


def _patience(world: World, end: End) -> float:
    """Seconds until this rank gives the others up.

    Of several ranks with a cause the lowest reports first; where the rank with the cause cannot, the lowest other one.
    """
    if end.says == Says.CAUSE:
        return GRACE + min(2.0, 0.25 * world.rank)
    return 2 * GRACE + STAGGER * world.rank


def _finalize(code: int) -> None:
    """Finalize MPI although messages of the broken call are under way; end the process if that hangs.

    MPI libraries write what they think of such messages. The error has been reported, so nobody needs to read that.
    """
    sys.stdout.flush()
    timer = threading.Timer(FINALIZE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    here().groups.clear()
    exit_hooks.stop_watching()
    stderr = None
    with suppress(OSError):  # of a process that can open no more files
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        runtime.mpi().Finalize()
    finally:
        if stderr is not None:
            os.dup2(stderr, 2)
        timer.cancel()
    if other_threads():  # the interpreter would wait for them, and they for other ranks
        os._exit(code)


def other_threads() -> list[threading.Thread]:
    """The other threads that the end of the interpreter waits for."""
    return [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
