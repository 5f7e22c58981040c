"""Runs a program so that failure on one rank ends the whole job, in seconds and with one report.

MPI itself has no such thing: a Python process that raises enters MPI_Finalize and waits there, and its peers wait in
whatever they were doing. What happens here instead:

- an exception (KeyboardInterrupt included) is printed by the rank it came from, and MPI_Abort ends the job;
- an exit code that all ranks leave with is passed through, after an orderly MPI_Finalize;
- a non-zero exit code of some ranks only ends the job with that code after GRACE seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

import numpy as np

from mpipipe.comm import departure, runtime
from mpipipe.errors import MpipipeError, StageError

GRACE = 3.0  # seconds: for peers to reach an agreed exit, and for the rank with the cause to report first
STAGGER = 0.2  # seconds between the ranks that report in its place
PAUSE = 2e-3
INTERRUPTED = 130  # shells: 128 + SIGINT


def guarded(main) -> int:
    """Call `main()` on every rank of COMM_WORLD and return the exit code that all ranks agree on.

    Does not return where ranks fail or disagree: the job is aborted.
    """
    try:
        comm = runtime.world().Dup()
    except MpipipeError as error:
        if runtime.promised_rank(os.environ) == 0:  # each of the lone processes finds the same
            _write(_report(error, "mpipipe: cannot start"))
        return 1
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:
        _end_job(comm, error)
        raise
    return _agree_on_exit(comm, code)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _agree_on_exit(comm, code: int) -> int:
    """Wait for all ranks to leave; one that leaves with an error does not wait for long."""
    departure.say_all()
    codes = np.zeros(comm.size, np.int64)
    request = comm.Iallgather(np.array([code], np.int64), codes)
    start = time.monotonic()
    while not request.Test():
        if code != 0 and time.monotonic() - start > GRACE:
            _write(f"{_heading(comm)} exited with code {code} while other ranks were still running\n")
            comm.Abort(code)
        time.sleep(PAUSE)
    if len(set(codes.tolist())) > 1 and comm.rank == int(np.argmax(codes)):
        listing = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(codes.tolist()))
        _write(f"mpipipe: ranks left with different exit codes ({listing})\n")
    return int(codes.max())


def _end_job(comm, error: BaseException):
    """Report, unless the rank with the cause does, and abort."""
    code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if getattr(error, "echo", False):
        # the rank with the cause ends the job before this is over; where it cannot, the lowest other rank does
        time.sleep(2 * GRACE + STAGGER * comm.rank)
    else:
        time.sleep(min(1.0, 0.05 * comm.rank))  # where several have a cause, the lowest reports
    _write(_report(error, _heading(comm)))
    comm.Abort(code)


def _heading(comm) -> str:
    return f"mpipipe: job ended by rank {comm.rank} of {comm.size} on {socket.gethostname()}:"


def _report(error: BaseException, heading: str) -> str:
    """What went wrong and where; and for what is not an error of this package, its traceback."""
    text = f"{heading}\n  {type(error).__name__}: {error}\n"
    if isinstance(error, MpipipeError) and not isinstance(error, StageError):
        return text  # the message says it all
    cause = error.__cause__ if error.__cause__ is not None else error
    return text + "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))


def _write(text: str):
    """In one piece, so that reports of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, text.encode())
