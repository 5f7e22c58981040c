"""What a rank writes when it ends a job, and the times and exit codes of such an end."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

from mpipipe.errors import MpipipeError, StageError

GRACE = 3.0  # seconds: for peers to come to their end after an error, and for the rank with the cause to report first
STAGGER = 0.2  # seconds between ranks that report in its place
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
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or never opened
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass
