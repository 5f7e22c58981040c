"""The report of a rank that ends a job, the end of a job at once, and its exit codes."""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import signal
import socket
import stat
import sys
import sysconfig
import termios
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from mpipipe.errors import MpipipeError, StageError
from mpipipe.job.context import current_rank, finalized, is_rank
from mpipipe.job.types import MpiCommunicator

# Seconds: for peers to come to their end after an error, and for the rank with the cause to report
# first.
GRACE = 3.0
TAKEN_SECONDS = 2.0  # for the launcher to read what this rank has written: it may be stopped
AGREED = 2  # exit code for an error that all ranks raise alike, and for wrong usage
PACKAGE = str(Path(__file__).parents[1]) + os.sep
STANDARD = sysconfig.get_path("stdlib") + os.sep
INTERRUPTED = 130  # shells: 128 + SIGINT


def turn(rank: int) -> float:
    """Return the seconds after which a rank speaks: the lowest one speaks for all."""
    return min(5.0, 0.2 * rank)


def heading(rank: int, size: int) -> str:
    """Return the first line of every report; a process alone has no rank to speak of."""
    if size == 1:
        return "mpipipe: stopped:"
    return f"mpipipe: job ended by rank {rank} of {size} on {socket.gethostname()}:"


def describe_error(error: BaseException, heading: str) -> str:
    """Say what went wrong and at which line of the user's own code.

    An error that is not of this package has its traceback as well, which begins with that code.
    """
    text = f"{heading}\n  {type(error).__name__}"
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        message = message.replace("\n", "\n  ")
    if message:
        text += f": {message}"
    message_is_enough = isinstance(error, (MpipipeError, KeyboardInterrupt))
    cause = error.__cause__ or error
    frame = None
    for trace in (error.__traceback__, cause.__traceback__):
        frame = users_frame(traceback.extract_tb(trace)) or frame
    if frame is not None:
        text += f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    text += "\n"
    if message_is_enough and not isinstance(error, StageError):
        return text
    trace = cause.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return text + "".join(
        traceback.format_exception(type(cause), cause, trace or cause.__traceback__)
    )


def users_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's own code; None where there is none."""
    innermost = None
    for frame in frames:
        if is_users(frame.filename):
            innermost = frame
    return innermost


def is_users(filename: str) -> bool:
    """Return True for a file that is neither of this package, nor of Python, nor installed."""
    installed = {"site-packages", "dist-packages"}.intersection(Path(filename).parts)
    return not (installed or filename.startswith((PACKAGE, STANDARD, "<")))


def write(text: str) -> None:
    """Write to stderr in one piece, so that reports of several ranks do not mix; never raises."""
    flush()
    with suppress(OSError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


def wait_for_launcher() -> None:
    """Wait until the launcher has read what this process wrote, for TAKEN_SECONDS at most.

    A launcher that learns of MPI_Abort ends at once, and what it has not read from its ranks' pipes
    by then is lost: seen with MPICH's. There is no pause after it has read: other ranks would
    report meanwhile.
    """
    flush()
    stop = time.monotonic() + TAKEN_SECONDS
    while (_unread(1) or _unread(2)) and time.monotonic() < stop:
        time.sleep(1e-3)


def flush() -> None:
    """Flush what Python has kept of stdout and stderr; never raises."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never opened
            stream.flush()


def _unread(descriptor: int) -> int:
    """Return how many bytes of this pipe are not read yet; 0 for all that is not a pipe."""
    count = array.array("i", [0])
    with suppress(OSError):  # closed
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


# -- The end of a whole job at once, by MPI_Abort, which does not end every process that calls it --


def abort_job(world: MpiCommunicator, code: int) -> NoReturn:
    """End the job by MPI_Abort.

    It first waits until the launcher has read what was written, and no Ctrl-C keeps the main thread
    from the end.

    `world` is COMM_WORLD, no duplicate of it: on a duplicate MPICH ends one rank after the other,
    and its launcher may return 0 then, as if the job had been a success.

    MPICH's MPI_Abort may return, as under `srun --mpi=pmi2`: this process then ends by a signal.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        wait_for_launcher()
    finally:
        world.Abort(code)
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(code)  # the signal comes first


# -- In a script that was started without `run_or_abort`: an exception ends the whole job ----------
#
# The rank reports it as Python does, gives its peers some seconds to say where they were, and calls
# MPI_Abort.


_libraries: list[ModuleType] = []  # MPI, once the hook is installed
_deaths: list[BaseException] = []  # the errors that ended the script


def install(MPI: ModuleType) -> None:
    """Let an exception that ends this rank's script end the whole job, by MPI_Abort.

    Nothing happens in an interactive session.
    """
    if _libraries:
        return
    _libraries.append(MPI)
    previous = sys.excepthook

    def report_and_remember(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        if not sys.flags.interactive and "ps1" not in vars(sys):
            _deaths.append(error)

    sys.excepthook = report_and_remember
    # MPI_Finalize, should the script call it, begins with what is attached to COMM_SELF
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: before_finalize()), True)


def forget() -> None:
    """Forget what a program showed by `sys.excepthook`: `run_or_abort` has dealt with its end."""
    _deaths.clear()


# -- What happens at the end of a rank's script: its peers learn of it -----------------------------
#
# A process that a script forked is no rank: it says nothing when it ends.


def say_farewell() -> None:
    """Let the other ranks of all groups know that this rank leaves; once in each group."""
    if is_rank():
        for group in (*current_rank().groups, *current_rank().failed):
            group.leave()


def stop_watching() -> None:
    """End the watchdog of this rank: MPI is about to be finalized."""
    watchdog = current_rank().watchdog
    if is_rank() and watchdog is not None:
        watchdog.stop()


def before_finalize() -> None:
    """Do what must happen before MPI is finalized: the peers learn of it, the watchdog stops."""
    say_farewell()
    stop_watching()


def _at_exit() -> None:
    try:
        before_finalize()
    finally:
        if is_rank() and _deaths and not finalized():
            flush()
            error = _deaths[0]
            world = _libraries[0].COMM_WORLD
            # Peers that learn of it have time to say where they were, and leave the end to the rank
            # with the cause.
            seconds = 1.0 + min(1.0, 0.05 * world.rank)
            if getattr(error, "reported_elsewhere", False):
                seconds = 2 * GRACE + turn(world.rank)
            time.sleep(seconds)
            write(
                f"mpipipe: rank {world.rank} of {world.size} died of {type(error).__name__}: the "
                "job ends here\n"
            )
            code = 1
            if isinstance(error, KeyboardInterrupt):
                code = INTERRUPTED
            abort_job(world, code)


atexit.register(_at_exit)  # early: so it runs after nearly all other exit functions
