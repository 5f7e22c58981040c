"""Signals that ask a job to leave, noticed at once: also in a computation or in MPI.

    kernel -> Python's handler in C -> a byte in a pipe -> a thread      at once
                                    -> a function in Python              once the main thread runs

    first signal                       noted, and told by rank 0; the time of grace begins
    more, within REPEAT_SECONDS        the same request: a launcher may hand on what ranks have got
    one more, later                    the job ends at once, unless it is on its way out already
    the time of grace is over          the job ends at once
    another rank has ended meanwhile   the job ends at once: no further step can be done

A process that was asked to leave stays under these rules until it ends: a later object for the same
signals finds it asked already. One that was not gets its handlers back. Of several, one within the
other, the innermost acts.

The command `train` catches signals from its first line to its last: `hold` begins before anything
else is imported, `change` follows the configuration once that is read, and `ignore` comes when only
MPI is left to finalize.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import TypeAlias

from mpipipe.errors import ArgumentError

# What a program has set for a signal.
Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"
CATCHABLE = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "XCPU")
REPEAT_SECONDS = 2.0
LOOK_SECONDS = 0.5  # between two looks for ranks that have ended
WAKE = b"\0"  # no signal has this number
HELD_GRACE = 600.0  # seconds
DEFAULT = "USR2,TERM"
_active: list[StopSignals] = []  # the innermost last
_held: list[StopSignals] = []  # the one of `hold`
_exit = os._exit  # before a program is watched


def parse_signals(names: str | Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return the signals of a list such as "USR2,SIGTERM"; "" and "none" are no signals."""
    if not isinstance(names, str):
        return tuple(names)
    if names.strip().lower() in ("", "none"):
        return ()
    numbers = []
    for name in names.split(","):
        short = name.strip().upper().removeprefix("SIG")
        if short not in CATCHABLE:
            why = "no signal that can ask to leave"
            if short in ("KILL", "STOP"):
                why = "a signal that cannot be caught"
            raise ArgumentError(
                why, found=repr(name.strip()), expected=f"none, or some of {', '.join(CATCHABLE)}"
            )
        numbers.append(signal.Signals[f"SIG{short}"])
    return tuple(dict.fromkeys(numbers))


class StopSignals:
    """Catches some signals of this process, in its main thread: Python sets handlers there.

    `grace` are the seconds from the first signal, which is `first` once it has come, until the job
    ends at once. A thread calls `tell` with the name of the first signal, `hopeless` from then on,
    to ask whether no further step can be done, and `end` with a text and an exit code, to end the
    job at once; the text is "" where others have said why.
    """

    def __init__(
        self,
        numbers: Iterable[signal.Signals],
        grace: float = math.inf,
        tell: Callable[[str], object] = lambda name: None,
        end: Callable[[str, int], object] = lambda text, code: None,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        self.numbers = tuple(numbers)
        self.grace = grace
        self._tell = tell
        self._end = end
        self._hopeless = hopeless
        self.first: signal.Signals | None = None
        self._since = 0.0
        for other in _active:
            # This process was asked to leave, and has not: it still is.
            if other.first in self.numbers:
                self.first = other.first
                self._since = other._since
        self._leaving = self._closing = False
        self._before: dict[int, Handler] = {}
        self._previous_fd = -1
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "signals are caught in the main thread only",
                found=threading.current_thread().name,
                remedy="make the object in the main thread, or give it no signals",
            )
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self.numbers:
            self._catch(number)
        _active.append(self)
        self._thread = threading.Thread(
            target=self._listen, name="mpipipe stop signals", daemon=True
        )
        self._thread.start()

    def change(self, numbers: Iterable[signal.Signals]) -> None:
        """Catch other signals. One that has come and is not among them does what it would have."""
        new = tuple(numbers)
        for number in self.numbers:
            if number not in new:
                signal.signal(number, self._before.pop(number))
        for number in new:
            if number not in self._before:
                self._catch(number)
        self.numbers = new
        if self.first is not None and self.first not in new:
            first = self.first
            self.first = None
            os.kill(os.getpid(), first)

    def _catch(self, number: signal.Signals) -> None:
        self._before[number] = signal.signal(number, self._note)
        # Libraries in C may not expect that a system call is cut short.
        signal.siginterrupt(number, False)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self.first is None:
            self._since = time.monotonic()
            self.first = signal.Signals(number)

    # -- the thread --------------------------------------------------------------------------------

    def _listen(self) -> None:
        has_told = False
        while not self._closing:
            first = self.first
            left = None
            innermost = _active[-1:] == [self]
            if first is not None and innermost:
                left = self.grace - (time.monotonic() - self._since)
                hopeless = self._hopeless()
                if left <= 0 or hopeless:
                    text = ""
                    if not hopeless:
                        text = (
                            f"{first.name}: the job had {self.grace:g} s to leave, which are over"
                        )
                    self._end(text, 128 + first)
                    return
                if not has_told and not self._leaving:
                    has_told = True
                    with suppress(Exception):  # the thread has to live on
                        self._tell(first.name)
                left = min(left, LOOK_SECONDS)
            if not select.select([self._read], [], [], left)[0]:
                continue
            content = os.read(self._read, 64)
            if self._previous_fd >= 0:  # somebody else listens, too
                with suppress(OSError):
                    os.write(self._previous_fd, content.replace(WAKE, b""))
            for number in filter(self._before.__contains__, content):
                self._note(number)
                late = time.monotonic() - self._since > REPEAT_SECONDS
                if has_told and late and not self._leaving and innermost:
                    name = signal.Signals(number).name
                    self._end(f"{name}: a second signal ends the job at once", 128 + number)
                    return

    # -- the end -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Ignore signals: this process is on its way out, and launchers end the slower ones."""
        self._leaving = True

    def close(self) -> None:
        """Give the handlers back, unless this process has to leave. May be called twice."""
        if self._closing or not self.numbers or self._leaving or self.first is not None:
            return
        self.release(self._before)
        os.write(self._write, WAKE)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def release(self, handlers: Mapping[int, Handler]) -> None:
        """Give the signals to these handlers; the thread ends once it wakes."""
        self._closing = True
        _active.remove(self)
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)


# -- a whole process -------------------------------------------------------------------------------


def hold(names: str) -> None:
    """Catch signals before anything else is known; wrong names are refused with the options."""
    try:
        numbers = parse_signals(names)
    except ArgumentError:
        numbers = parse_signals(DEFAULT)
    if numbers:
        _held.append(StopSignals(numbers, HELD_GRACE, end=_end_at_once))


def change(signals: Iterable[signal.Signals]) -> None:
    """Catch these signals in place of those of `hold`, where that was called."""
    for holder in _held:
        holder.change(signals)


def ignore() -> None:
    """Ignore all signals that are caught here, to the very end: the work is over."""
    while _active:
        innermost = _active[-1]
        innermost.release(dict.fromkeys(innermost.numbers, signal.SIG_IGN))
        os.write(innermost._write, WAKE)
    _held.clear()


def _end_at_once(text: str, code: int) -> None:
    with suppress(OSError):
        os.write(2, f"mpipipe: {text}\n".encode())
    _exit(code)


def _forget() -> None:
    """Give the handlers back in a forked child: it is no rank, and dies of signals as usual."""
    while _active:
        _active[-1].release(_active[-1]._before)


os.register_at_fork(after_in_child=_forget)
