"""Where a training writes while it runs: a stream of text, and a file of lines. Neither can end the training.

A closed terminal or a full disk is no reason to lose what was trained: the stream falls silent, and lines of the file
are kept until they can be written.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import suppress

KEPT = 10_000  # lines that wait for room on the disk; of more, the oldest are given up


class Outlet:
    """A stream of text that falls silent, for good, once it cannot be written to.

    It has what rich asks of a file. What cannot be encoded is escaped.

    Parameters
    ----------
    stream : a text stream; None, which is what Python makes of a closed standard output, is silent from the start
    """

    def __init__(self, stream):
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write and flush."""
        if self.stream is not None:
            try:
                self.stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
                self.stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._fall_silent(error)
        return len(text)

    def flush(self):
        """Nothing: `write` has done it."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.stream is not None and self.stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor."""
        if self.stream is None:
            raise OSError("a silent stream has no descriptor")
        return self.stream.fileno()

    def _fall_silent(self, error):
        stream, self.stream = self.stream, None
        if not isinstance(error, (BrokenPipeError, ValueError)):  # a reader that left, as `head` does, is no surprise
            tell(f"mpipipe: nothing more is shown, since the output cannot be written: {error}; the work goes on")
        # what the stream still holds would fail again where Python flushes it at its end, with a traceback
        with suppress(OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


def tell(text: str):
    """One line on standard error, if there is one that can be written to."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class Lines:
    """A new file of whole lines, each of which can be read as soon as it is written.

    Where a line cannot be written, what there is of it is cut off again, standard error is told once, and the line
    waits for the next one or for `close`.

    Parameters
    ----------
    path : FileExistsError where there is such a file, other OSErrors where it cannot be made
    """

    def __init__(self, path):
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.whole = 0  # bytes of whole lines in the file
        self.waiting: deque[bytes] = deque(maxlen=KEPT)
        self.lost = 0
        self.told = False

    def append(self, line: str):
        """Write a line, after those that wait; never raises OSError."""
        self.lost += len(self.waiting) == KEPT
        self.waiting.append(f"{line}\n".encode())
        self._write()

    def close(self):
        """Try once more to write what waits; may be called twice."""
        if self.descriptor < 0:
            return
        self._write()
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1
        if self.waiting or self.lost:
            tell(f"mpipipe: {len(self.waiting) + self.lost} lines of {self.path} could not be written")

    def _write(self):
        try:
            while self.waiting:
                rest = memoryview(self.waiting[0])
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
                self.whole += len(self.waiting.popleft())
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.whole)
            if not self.told:
                self.told = True
                tell(f"mpipipe: {self.path} cannot be written: {error.strerror}; the training goes on, and tries again")
