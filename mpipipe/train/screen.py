"""A progress bar on the terminal from which a training was started, also under mpiexec.

    the shell's terminal  <--  mpiexec  <--  pipe  <--  standard output of rank 0
           ^                                                    |
           +--------------- the bar is drawn here --------------+  (/proc/<mpiexec>/fd/1)

A rank has no terminal: its launcher takes what it writes, and passes it on. If the launcher runs on the same host and
writes to a terminal, rank 0 finds that terminal and draws the bar on it. Lines of text go to standard output.
"""

from __future__ import annotations

import os
import stat
import sys
import termios
import textwrap
from collections import deque
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TextIO

from mpipipe import files
from mpipipe.job import current_rank, report
from mpipipe.text import counted

COLUMNS = 100  # most characters in a line of progress
LAUNCHERS = (*report.LAUNCHERS, "mpiexec.hydra", "mpirun.hydra", "orterun")
AGAIN = 0.2  # seconds between two drawings of the bar
AFTER_TEXT = 0.5  # seconds without a bar after a line of text: the launcher delays the line, which must not meet a bar
CELLS = 24  # characters of a full bar
LEAST_CELLS = 4  # fewer are not worth their room


def folded(text: str) -> str:
    """Break lines that are longer than COLUMNS, between words if possible; nothing else changes."""
    lines = []
    for line in text.split("\n"):
        lines += [line] if len(line) <= COLUMNS else _FOLD.wrap(line)
    return "\n".join(lines)


_FOLD = textwrap.TextWrapper(
    COLUMNS, expand_tabs=False, replace_whitespace=False, drop_whitespace=False, break_on_hyphens=False
)


def bar_line(done: int, steps: int, rate: float, timing: str, width: int) -> str:
    """Write how far a training is; in a narrow window the bar shrinks and goes first, then the rate.

    >>> for width in (70, 50, 40):
    ...     print(bar_line(150, 300, 2.5, "1m00s, 1m00s left", width))
    step 150/300 [############............] 2.5 steps/s  1m00s, 1m00s left
    step 150/300 [##..] 2.5 steps/s  1m00s, 1m00s left
    step 150/300  1m00s, 1m00s left
    """
    place, speed = f"step {done}/{steps}", f"{rate:.3g} steps/s"
    cells = min(CELLS, width - len(f"{place} [] {speed}  {timing}"))
    if cells >= LEAST_CELLS:
        full = cells * done // steps
        return f"{place} [{'#' * full}{'.' * (cells - full)}] {speed}  {timing}"
    whole = f"{place}  {speed}  {timing}"
    return whole if len(whole) <= width else f"{place}  {timing}"[: max(width, 0)]


class Bar:
    """One line on a terminal, drawn again and again: steps, a bar, steps per second, elapsed time and time left.

    Drawing never waits and never fails: if the terminal takes no more text or is closed, nothing is drawn. The line is
    as wide as the terminal, so that what a launcher writes meanwhile, as on Ctrl-C, begins a new line.
    """

    def __init__(self, descriptor: int, steps: int) -> None:
        self.descriptor, self.steps = descriptor, steps
        self.next = 0.0  # when to draw again
        self.drawn = False

    def draw(self, done: int, rate: float, timing: str) -> None:
        """Draw the line after `done` steps, unless it was drawn less than AGAIN seconds ago."""
        if monotonic() < self.next:
            return
        width = COLUMNS
        with suppress(OSError):
            width = os.get_terminal_size(self.descriptor).columns or COLUMNS
        text = bar_line(done, self.steps, rate, timing, width - 1)
        self._write(f"\r{text:<{width}}")
        self.next, self.drawn = monotonic() + AGAIN, True

    def clear(self) -> None:
        """Remove the line, before a line of text."""
        if self.drawn:
            self._write("\r\x1b[K")
        self.next, self.drawn = monotonic() + AFTER_TEXT, False

    def close(self) -> None:
        """Remove the line for good. May be called twice."""
        self.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self.descriptor, text.encode())


def find_terminal(stream: TextIO | None = None) -> int | None:
    """Open the terminal on which `stream`, or the launcher of this rank, shows text; None without a terminal."""
    stream = stream or sys.stdout
    try:
        own = stream.fileno() if stream is not None else -1
        kind = os.fstat(own).st_mode
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return None
    launcher = _launcher_output()
    if launcher is not None:  # a rank: Open MPI gives it a terminal of its own, which shows nothing
        passed_on = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(own)
        return _open(launcher) if passed_on else None
    return _open(f"/proc/self/fd/{own}") if os.isatty(own) else None


def _launcher_output() -> str | None:
    """Return the path of the standard output of the launcher that has started this process; None without a launcher."""
    process = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while process > 1:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
            if name in LAUNCHERS:
                return f"/proc/{process}/fd/1"
            process = int(rest.split()[1])
    return None


def _open(path: str) -> int | None:
    """Open a terminal so that no write can wait or stop this process; None if that is not possible."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    with suppress(OSError):
        if stat.S_ISCHR(os.stat(path).st_mode):
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            with suppress(termios.error):  # not a terminal
                if termios.tcgetattr(descriptor)[3] & termios.TOSTOP == 0:  # TOSTOP stops a background job that writes
                    return descriptor
            os.close(descriptor)
    return None


# -- Where a training writes while it runs: a stream of text, and a file of lines. Neither can end the training -------
#
# A closed terminal or a full disk is no reason to lose what was trained. The stream falls silent; lines of the file are
# kept until they can be written.


KEPT = 10_000  # lines that wait for room on the disk; of more, the oldest are given up


class SafeStream:
    """A stream of text that falls silent, for good, once it cannot be written to; None is silent from the start.

    The program's exit code will be 1 then, unless the reader has left. Characters that cannot be encoded are escaped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> None:
        stream = self.stream
        if stream is None:
            return
        try:
            stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.stream = None
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # a reader may leave, as `head`
                current_rank().unwritten = True
                reason = error.strerror or str(error)
                warn(f"mpipipe: the output cannot be written: {reason}; the work goes on, and its exit code will be 1")
            files.silence(stream)


def warn(text: str) -> None:
    """Write one line to standard error, if that is possible."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class JsonLines:
    """A file of whole lines, which can be read as soon as they are written.

    A line that can be written in part only is cut off again, and waits for the next line or for `close`; one warning
    says so. Unless it `goes_on`, FileExistsError is raised for a file that is there.
    """

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        self.path = path
        new = 0 if goes_on else os.O_EXCL
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | new | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.whole = os.fstat(self.descriptor).st_size  # bytes of whole lines in the file
        self.waiting: deque[bytes] = deque(maxlen=KEPT)
        self.lost, self.told = 0, False

    def append(self, line: str) -> None:
        """Write a line after those that wait. Never raises OSError."""
        self.lost += len(self.waiting) == KEPT
        self.waiting.append(f"{line}\n".encode(errors="backslashreplace"))  # the name of a file may be no text
        self._write()

    def sync(self) -> None:
        """Force the lines to the disk, as far as they could be written. Never raises OSError."""
        with suppress(OSError):
            os.fsync(self.descriptor)

    def close(self) -> None:
        """Try once more to write the lines that wait, and close the file. May be called twice."""
        if self.descriptor < 0:
            return
        self._write()
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1
        if self.waiting or self.lost:
            warn(f"mpipipe: {counted(len(self.waiting) + self.lost, 'line')} of {self.path} could not be written")

    def _write(self) -> None:
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
                warn(f"mpipipe: {self.path} cannot be written: {error.strerror}; the training goes on, and tries again")
