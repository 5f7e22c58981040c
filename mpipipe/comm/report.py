"""What a rank writes when it ends a job, and the times and exit codes of such an end."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
import sys
import termios
import time
import traceback
from pathlib import Path

from mpipipe.errors import MpipipeError, StageError

GRACE = 3.0  # seconds: for peers to come to their end after an error, and for the rank with the cause to report first
STAGGER = 0.2  # seconds between ranks that report in its place
TAKEN_SECONDS = 2.0  # for the launcher to read what this rank has written: it may be stopped
AGREED = 2  # exit code for an error that all ranks raise alike, and for wrong usage
PACKAGE = str(Path(__file__).parents[1]) + os.sep
INTERRUPTED = 130  # shells: 128 + SIGINT


def heading(rank: int, size: int) -> str:
    """The first line of every report. One process alone has neither a job nor a rank to speak of."""
    if size == 1:
        return "mpipipe: stopped:"
    return f"mpipipe: job ended by rank {rank} of {size} on {socket.gethostname()}:"


def describe(error: BaseException, heading: str) -> str:
    """What went wrong and where; for an error that is not of this package, its traceback, too.

    An interrupt is no error: who pressed Ctrl-C reads in a few lines where the program was.
    """
    if isinstance(error, KeyboardInterrupt):
        said = _with_colon(str(error)).replace("\n", "\n  ")
        return f"{heading}\n  KeyboardInterrupt{said}\n{_place(error)}"
    text = f"{heading}\n  {type(error).__name__}: {error}\n"
    if isinstance(error, MpipipeError) and not isinstance(error, StageError):
        return text  # the message says it all
    cause = error.__cause__ if error.__cause__ is not None else error
    return text + "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))


def _with_colon(text: str) -> str:
    return f": {text}" if text else ""


def _place(error: BaseException) -> str:
    """A line that names the innermost function outside of this package, or "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGE)]
    return f"  in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})\n" if frames else ""


def write(text: str) -> None:
    """Write to stderr in one piece, so that reports of several ranks do not mix.

    Never raises, whatever the text, and even where nobody reads it.
    """
    _flush()
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def wait_for_launcher() -> None:
    """Return when the launcher has read what this process has written; a stopped one is not waited for for long.

    A launcher reads the output of its ranks from pipes. One that hears of MPI_Abort ends at once, and what it has not
    read by then is lost: seen with MPICH's on a busy machine. There is no pause after it has read: other ranks would
    report meanwhile.
    """
    _flush()
    stop = time.monotonic() + TAKEN_SECONDS
    while any(_unread(descriptor) for descriptor in (1, 2)) and time.monotonic() < stop:
        time.sleep(1e-3)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or never opened


def _unread(descriptor: int) -> int:
    """How many bytes of this pipe nobody has read yet; 0 for all that is not a pipe."""
    count = array.array("i", [0])
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        pass  # closed
    return count[0]
