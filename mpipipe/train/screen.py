"""A line that is drawn over again on the terminal where somebody watches a training.

    the shell's terminal  <--  mpiexec  <--  pipe  <--  standard output of rank 0
           ^                                                    |
           +--------------- the bar is drawn here --------------+  (/proc/<mpiexec>/fd/1)

A rank has no terminal: its launcher takes what it writes, and passes it on. But where the launcher runs on the same
host and writes to a terminal, rank 0 finds that one and draws on it. Lines of text go to standard output as ever.
"""

from __future__ import annotations

import os
import stat
import sys
import termios
import textwrap
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TextIO

from mpipipe.comm import past_launcher

COLUMNS = 100  # that lines of progress have at most
LAUNCHERS = (*past_launcher.LAUNCHERS, "mpiexec.hydra", "mpirun.hydra", "orterun")
AGAIN = 0.2  # seconds between two pictures of a bar
AFTER_TEXT = (
    0.5  # seconds in which a line of text comes through the launcher: a bar in its way would stay on the screen
)
CELLS = 24  # of a full bar


def folded(text: str) -> str:
    """Break lines that are longer than COLUMNS, between words where there are any.

    Parameters
    ----------
    text : str
        Any lines.

    Returns
    -------
    str
        The same with more line ends, and nothing left out.

    Examples
    --------
    >>> from mpipipe.train.screen import folded
    >>> [len(line) for line in folded("word " * 25).splitlines()]
    [100, 25]
    """
    lines = []
    for line in text.split("\n"):
        fits = len(line) <= COLUMNS
        lines += (
            [line]
            if fits
            else textwrap.wrap(
                line,
                COLUMNS,
                expand_tabs=False,
                replace_whitespace=False,
                drop_whitespace=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)


class Bar:
    """One line on a terminal, drawn over again: steps, a bar, steps per second, time gone and time left.

    A terminal that takes no more text at once, or is closed, is left alone: drawing never waits and never fails.

    Parameters
    ----------
    descriptor : of the terminal, open for writing without waiting; it is closed by `close`
    steps : of the whole training
    """

    def __init__(self, descriptor: int, steps: int) -> None:
        self.descriptor, self.steps = descriptor, steps
        self.next = 0.0  # when to draw again
        self.drawn = False

    def draw(self, done: int, rate: float, timing: str) -> None:
        """Draw the line, unless that was a moment ago.

        Parameters
        ----------
        done : steps made
        rate : of them in a second
        timing : time gone and left, in words
        """
        if monotonic() < self.next:
            return
        full = CELLS * done // self.steps
        text = f"step {done}/{self.steps} [{'#' * full}{'.' * (CELLS - full)}] {rate:.3g} steps/s  {timing}"
        self._write("\r" + text[: _width(self.descriptor) - 1] + "\x1b[K\r")
        self.next, self.drawn = monotonic() + AGAIN, True

    def clear(self) -> None:
        """Take the line away, for a line of text."""
        if self.drawn:
            self._write("\r\x1b[K")
        self.next, self.drawn = monotonic() + AFTER_TEXT, False

    def close(self) -> None:
        """Take the line away for good. May be called twice."""
        self.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self.descriptor, text.encode())


def _width(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or COLUMNS
    except OSError:
        return COLUMNS


def find_terminal(stream: TextIO | None = None) -> int | None:
    """Open the terminal on which `stream` is shown, for a bar; None where there is none.

    That is the terminal which the stream is. For a rank it is the one to which its launcher writes, on the same host.

    Parameters
    ----------
    stream : standard output by default
    """
    stream = sys.stdout if stream is None else stream
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
    """Return the standard output of the launcher that this process descends from, as a path; None without one."""
    process = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while process > 1:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
            if name in LAUNCHERS:
                return f"/proc/{process}/fd/1"
            process = int(rest.split()[1])
    return None


def _open(path: str) -> int | None:
    """Open a terminal for drawing, so that no write can wait or stop this process."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return None
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if termios.tcgetattr(descriptor)[3] & termios.TOSTOP == 0:  # else a job in the background would be stopped
            return descriptor
    except termios.error:  # no terminal
        pass
    os.close(descriptor)
    return None
