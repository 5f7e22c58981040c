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
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TextIO

from mpipipe.comm import past_launcher

COLUMNS = 100  # most characters in a line of progress
LAUNCHERS = (*past_launcher.LAUNCHERS, "mpiexec.hydra", "mpirun.hydra", "orterun")
AGAIN = 0.2  # seconds between two drawings of the bar
AFTER_TEXT = 0.5  # seconds without a bar after a line of text: the launcher delays the line, which must not meet a bar
CELLS = 24  # characters of a full bar
LEAST_CELLS = 4  # fewer are not worth their room


def folded(text: str) -> str:
    """Break lines that are longer than COLUMNS, between words if possible.

    Parameters
    ----------
    text : str
        Any lines.

    Returns
    -------
    str
        The same text with more line ends.

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


def bar_line(done: int, steps: int, rate: float, timing: str, width: int) -> str:
    """Write how far a training is, with a bar of the room that is left.

    In a narrow window the bar shrinks and goes first, then the rate. The step and the time stay longest.

    Parameters
    ----------
    done, steps : int
        Steps made, and all of them.
    rate : float
        Steps in a second.
    timing : str
        Time gone and left, in words.
    width : int
        Characters that the line may have.

    Returns
    -------
    str
        One line.

    Examples
    --------
    >>> from mpipipe.train.screen import bar_line
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

    Parameters
    ----------
    descriptor : file descriptor of the terminal, opened for writing without waiting; `close` closes it
    steps : steps of the whole training
    """

    def __init__(self, descriptor: int, steps: int) -> None:
        self.descriptor, self.steps = descriptor, steps
        self.next = 0.0  # when to draw again
        self.drawn = False

    def draw(self, done: int, rate: float, timing: str) -> None:
        """Draw the line, unless it was drawn less than AGAIN seconds ago.

        Parameters
        ----------
        done : steps made so far
        rate : steps per second
        timing : elapsed time and time left, in words
        """
        if monotonic() < self.next:
            return
        width = _width(self.descriptor)
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


def _width(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or COLUMNS
    except OSError:
        return COLUMNS


def find_terminal(stream: TextIO | None = None) -> int | None:
    """Open the terminal on which `stream` is shown; None without a terminal.

    The stream may be that terminal itself. For a rank it is the terminal of its launcher, on the same host.

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
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return None
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if termios.tcgetattr(descriptor)[3] & termios.TOSTOP == 0:  # TOSTOP stops a background job that writes
            return descriptor
    except termios.error:  # not a terminal
        pass
    os.close(descriptor)
    return None
