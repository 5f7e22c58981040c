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

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
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
_listening: list[SignalListener] = []  # one while any are active
# What the program has set for the signals that are caught.
_before: dict[signal.Signals, Handler] = {}
_came: dict[signal.Signals, float] = {}  # time.monotonic() of the first of each
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
    ends at once. A thread calls `tell` and `end`, and asks whether it is `hopeless`.
    """

    def __init__(self, numbers: Iterable[signal.Signals], grace: float) -> None:
        self._numbers = tuple(numbers)
        self._grace = grace
        self._closed = False
        self._leaving = False  # this process is on its way out: launchers signal the slower ones
        self._told = False
        if not self._numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "signals are caught in the main thread only",
                found=threading.current_thread().name,
                remedy="make the object in the main thread, or give it no signals",
            )
        _active.append(self)
        _set_handlers()

    @property
    def _first(self) -> signal.Signals | None:
        """The first of the signals that has come to this process, also before this object."""
        return next(filter(self._numbers.__contains__, tuple(_came)), None)

    def close(self) -> None:
        """Give the handlers of signals back, unless one has come. May be called twice.

        Then a later object for it finds it asked already.
        """
        self._closed = True
        if self in _active and not self._leaving and self._first is None:
            _active.remove(self)
            _set_handlers()

    # -- called by the thread ----------------------------------------------------------------------

    def _tell(self, name: str) -> None:
        """Say that the first signal has come."""

    def _hopeless(self) -> bool:
        """Return whether no further step can be done, for a reason that others have told."""
        return False

    def _end(self, text: str, code: int) -> None:
        """End the job at once, with a text if there is one."""
        with suppress(OSError):
            os.write(2, f"mpipipe: {text}\n".encode())
        _exit(code)

    def _look(self, content: bytes) -> float | None:
        """Act on what has come; return the seconds until the next look, if there must be one."""
        first = self._first
        if first is None:
            return None
        waited = time.monotonic() - _came[first]
        repeated = self._told and waited > REPEAT_SECONDS and not self._leaving
        again = next(filter(self._numbers.__contains__, content), None)
        text = None
        if self._hopeless():
            text = ""
        elif waited >= self._grace:
            text = f"{first.name}: the job had {self._grace:g} s to leave, which are over"
        elif again is not None and repeated:
            first = signal.Signals(again)
            text = f"{first.name}: a second signal ends the job at once"
        if text is not None:
            _active.clear()
            self._end(text, 128 + first)
        elif not self._told and not self._leaving:
            self._told = True
            with suppress(Exception):  # the thread has to live on
                self._tell(first.name)
        return min(max(0.0, self._grace - waited), LOOK_SECONDS)


def _note(number: int, frame: FrameType | None = None) -> None:
    _came.setdefault(signal.Signals(number), time.monotonic())


def _set_handlers() -> None:
    """Catch the signals of all active objects, and no others."""
    wanted = {number for stops in _active for number in stops._numbers}
    if wanted and not _listening:
        listener = SignalListener()
        _listening.append(listener)
        listener.start()
    for number in wanted - _before.keys():
        _before[number] = signal.signal(number, _note)
        # Libraries in C may not expect that a system call is cut short.
        signal.siginterrupt(number, False)
    for number in _before.keys() - wanted:
        signal.signal(number, _before.pop(number))
    for listener in tuple(_listening):
        if not wanted:
            _listening.remove(listener)
        with suppress(BlockingIOError):
            os.write(listener.write, WAKE)
        if not wanted:
            signal.set_wakeup_fd(listener.previous)
            # A forked child has no such thread: it is over there.
            listener.join()
            os.close(listener.read)
            os.close(listener.write)


class SignalListener(threading.Thread):
    """Learns of signals by a pipe, and lets the innermost object act, until there is none."""

    def __init__(self) -> None:
        super().__init__(name="mpipipe stop signals", daemon=True)
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        self.previous = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)

    def run(self) -> None:
        """Listen."""
        content = b""
        while self in _listening and (innermost := _active[-1:]):
            seconds = innermost[0]._look(content)
            content = b""
            if select.select([self.read], [], [], seconds)[0]:
                content = os.read(self.read, 64)
                for number in filter(_before.__contains__, content):
                    _note(number)


# -- a whole process -------------------------------------------------------------------------------


def hold(names: str) -> None:
    """Catch signals before anything else is known; wrong names are refused with the options."""
    try:
        numbers = parse_signals(names)
    except ArgumentError:
        numbers = parse_signals(DEFAULT)
    StopSignals(numbers, HELD_GRACE)


def change(signals: Iterable[signal.Signals]) -> None:
    """Catch these signals in place of those of `hold`, where that was called.

    One that has come and is not among them does what it would have.
    """
    for holder in _active:
        holder._numbers = tuple(signals)
    _set_handlers()
    for number in _came.keys() - _before.keys():
        del _came[number]
        os.kill(os.getpid(), number)


def ignore() -> None:
    """Ignore all signals that are caught here, to the very end: the work is over."""
    _before.update(dict.fromkeys(_before, signal.SIG_IGN))
    _forget()


def _forget() -> None:
    """Give the handlers back in a forked child: it is no rank, and dies of signals as usual."""
    _active.clear()
    _set_handlers()


os.register_at_fork(after_in_child=_forget)
