"""The standard output of a command: text, or one line of an error where nothing can be written."""

from __future__ import annotations

import os
import signal
import sys

from mpipipe import files
from mpipipe.comm.abort import Stop

UNWRITTEN = 1  # exit code
READER_LEFT = 128 + signal.SIGPIPE  # the same, as of a program that the signal ends


def show(text: str) -> None:
    """Write text to the standard output, and flush it. Where Python has none, nothing happens.

    Raises Stop where it cannot be written: with one line for a full disk, say, and without a word where the reader has
    left, as `head` does.
    """
    stream = sys.stdout
    if stream is None:
        return
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        files.silence(stream)
        raise Stop("", READER_LEFT) from None
    except OSError as error:
        files.silence(stream)
        reason = error.strerror or os.strerror(error.errno or 0)
        raise Stop(f"mpipipe: the standard output cannot be written: {reason}\n", UNWRITTEN) from None
