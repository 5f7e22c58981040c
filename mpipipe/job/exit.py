"""Runs a program so that failure on one rank ends the whole job, in seconds and with one report.

MPI itself has no such thing: a Python process that raises enters MPI_Finalize and waits there, and
its peers wait in whatever they were doing. Under `run_or_abort`:

- a rank whose program ends, well or not, tells its peers, so that none waits for it, and then waits
  for them;
- once all ranks have come to their end, one of those with a cause reports, all leave with the same
  exit code, and MPI is finalized: this is how errors end that reach all ranks;
- where peers do not come within GRACE seconds of an error, the rank with the cause reports, and
  MPI_Abort ends the job.

See report.py for scripts that were started without this.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NamedTuple, NoReturn

import numpy as np

from mpipipe.errors import ArgumentError, BackendError, MpipipeError
from mpipipe.job import communicators, report, runtime, settings, stop_signals
from mpipipe.job.consensus import digest
from mpipipe.job.context import current_rank, finalized, is_rank, other_threads
from mpipipe.job.group import RankGroup, group_of
from mpipipe.job.report import (
    AGREED,
    GRACE,
    INTERRUPTED,
    abort_job,
    describe_error,
    heading,
    turn,
    write,
)
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator


class Stop(Exception):
    """Ends a program with an exit code, and a text that one rank writes to stderr as it is."""

    def __init__(self, text: str, code: int) -> None:
        self.text = text
        self.code = code
        super().__init__(text)


_running: list[JobRanks] = []  # while a program runs


def run_or_abort(main: Callable[[], object]) -> int:
    """Call `main()` on all ranks, so that an error of one ends the job; return the exit code.

    Any exception ends it, SystemExit and KeyboardInterrupt too. All ranks agree on the code, 0
    where all have ended well. A script ends with `sys.exit(run_or_abort(main))`. Within such a
    program, as under a command line that runs as a whole, it calls `main()` alone.
    """
    if _running:
        main()
        return 0
    try:
        comm = runtime.world()
        head = heading(comm.rank, comm.size)
        world = JobRanks(group_of(comm), communicators.duplicate(comm), head)
    except MpipipeError as error:
        if settings.launcher_rank(os.environ) == 0:  # each of the lone processes finds the same
            write(describe_error(error, heading(0, 1)))
        else:  # a launcher may end the others as soon as one has left
            time.sleep(GRACE)
        return 1
    _running.append(world)
    try:
        with _watching_os_exit(world):
            end = _run(main, world)
    finally:
        report.forget()
        stop_signals.ignore()
        _running.clear()
    if not is_rank():  # forked by the program: it must not touch MPI
        text = ""
        if end.cause == ExitCause.CAUSE:
            text = end.report
        write(text)
        os._exit(end.code)
    return leave_together(world, end)


def _run(main: Callable[[], object], world: JobRanks) -> ExitReport:
    try:
        with world.group.raise_together("the start of the program"):
            settings.check_settings()
        main()
        # as the interpreter does: they may still use the other ranks
        for thread in other_threads(threading.get_ident()):
            thread.join()
        if current_rank().unwritten:
            return ExitReport(1, ExitCause.CAUSE)
        return ExitReport(0)
    except SystemExit as leaving:
        code = _exit_code(leaving)
        cause = ExitCause.NOTHING
        if code:
            cause = ExitCause.EXITED
        text = f"{world.head}\n  exited with code {code}, unlike other ranks\n"
        return ExitReport(code, cause, text)
    except Stop as stop:
        return ExitReport(stop.code, ExitCause.CAUSE, stop.text)
    except BaseException as error:
        refusal = 0
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        elif world.group.agreed_on(error):
            code = AGREED
        cause = ExitCause.CAUSE
        if getattr(error, "reported_elsewhere", False):
            cause = ExitCause.REPORTED_ELSEWHERE
        if isinstance(error, (ArgumentError, BackendError)) and error.microbatch is None:
            refusal = digest(type(error).__name__, (("text", str(error)),))
        text = describe_error(error, world.head)
        return ExitReport(code, cause, text, refusal)


def _exit_code(leaving: SystemExit) -> int:
    """Return the code as the interpreter has it; what the system would cut to 0 stays 1."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF or int(leaving.code != 0)
    write(f"{leaving.code}\n")
    return 1


@contextmanager
def _watching_os_exit(world: JobRanks) -> Iterator[None]:
    """Let `os._exit` of a rank end the job with a report, within.

    Otherwise the other ranks would wait for ever, and some launchers would call the job a success.
    """
    original = os._exit
    leaving = threading.Event()

    def exit_rank(status: int) -> NoReturn:
        if is_rank() and not finalized():
            leaving.set()
            write(f"{world.head}\n  os._exit({status}) was called: the other ranks cannot go on\n")
            faulthandler.dump_traceback(all_threads=False)
            abort_job(runtime.world(), status & 0xFF or 1)
        original(status)

    os._exit = exit_rank
    try:
        yield
    finally:
        if leaving.is_set():  # another thread ends the job
            time.sleep(report.TAKEN_SECONDS + GRACE)
        os._exit = original


# -- How all ranks of a job end together: who reports, and the exit code of all --------------------
#
#     rank 0   main() returned     [code 0, NOTHING]              |
#     rank 1   ValueError          [code 1, CAUSE]                |  one all-gather: rank 1 reports
#     rank 2   PeerError of it     [code 1, REPORTED_ELSEWHERE]   |


# Seconds that a rank without an error waits for its peers before it tells them that it has left.
QUIET = 0.2
FINALIZE = 20.0  # seconds for MPI_Finalize after an error
PAUSE = 2e-3


class ExitCause(IntEnum):
    """What a rank has to report at its end; where ranks differ, the highest one speaks."""

    NOTHING = 0
    REPORTED_ELSEWHERE = 1  # an error that another rank reports
    EXITED = 2  # it has left with a code
    CAUSE = 3  # an error of its own


class ExitReport(NamedTuple):
    """How the program of one rank ended."""

    code: int  # its exit code
    cause: ExitCause = ExitCause.NOTHING
    report: str = ""  # the text to write, if it is this rank that speaks
    # Of the text of an error of this package, but for failed computations: alike, the same number.
    refusal: int = 0


class JobRanks(NamedTuple):
    """All ranks of the job: their group, and a communicator for nothing but their end."""

    group: RankGroup
    end: Communicator
    head: str  # the first line of a report of this rank


def leave_together(world: JobRanks, end: ExitReport) -> int:
    """Wait for all ranks to end; one that ends with an error does not wait for long."""
    if finalized():
        if end.report and end.code:
            write(end.report)
        return end.code
    try:
        table = _all_ends(world, end)
    except KeyboardInterrupt:
        write(f"{world.head}\n  KeyboardInterrupt while it waited for the other ranks to end\n")
        abort_job(runtime.world(), INTERRUPTED)
    codes, causes, refusals = table.T.tolist()
    if len(set(codes)) == 1 and set(causes) in ({ExitCause.NOTHING}, {ExitCause.EXITED}):
        return codes[0]
    speaker = causes.index(max(causes))
    code = codes[speaker]
    if refusals[0] != 0 and len(set(refusals)) == 1:
        code = AGREED
    if world.end.rank == speaker:
        write(end.report)
    _finalize(code)
    return code


def _all_ends(world: JobRanks, end: ExitReport) -> np.ndarray:
    """Return (exit code, ExitCause, refusal) of each rank; abort if that takes too long."""
    current_rank().ended = True
    rank = world.end.rank
    table = np.zeros((world.end.size, 3), np.int64)
    row = np.array([end.code, end.cause, end.refusal], np.int64)
    request = own(world.end.Iallgather(row, table))
    start = time.monotonic()
    has_told = False
    # of several ranks with a cause the lowest reports first; where the rank with the cause cannot,
    # the lowest other one
    patience = 2 * GRACE + turn(rank)
    if end.cause == ExitCause.CAUSE:
        patience = GRACE + min(2.0, 0.25 * rank)
    while not request.Test():
        waited = time.monotonic() - start
        if not has_told and (end.code or waited > QUIET):
            has_told = True
            report.say_farewell()
        if end.code and waited > patience:
            write(end.report)
            abort_job(runtime.world(), end.code)
        time.sleep(PAUSE)
    return table


def _finalize(code: int) -> None:
    """Finalize MPI while messages of a broken call are under way; end the process if it hangs.

    MPI libraries write what they think of such messages. The error has been reported, so that is
    dropped.
    """
    sys.stdout.flush()
    timer = threading.Timer(FINALIZE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    current_rank().groups.clear()
    report.stop_watching()
    stderr = None
    with suppress(OSError):  # a process may be able to open no more files
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        runtime.mpi().Finalize()
    finally:
        if stderr is not None:
            os.dup2(stderr, 2)
        timer.cancel()
    # The interpreter would wait for them, and they for other ranks.
    if other_threads(threading.get_ident()):
        os._exit(code)
