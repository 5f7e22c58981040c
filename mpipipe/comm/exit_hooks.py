"""What happens at the end of a rank's script: its peers are told, so that none of them waits for it.

A process that a script forked is no rank: it says nothing when it ends.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

from mpipipe.comm.process import here, is_rank

_last: list[Callable[[], None]] = []


def say_farewell() -> None:
    """Tell the other ranks of all groups that this rank leaves; each group is told once."""
    if is_rank():
        for group in (*here().groups, *here().failed):
            group.leave()


def stop_watching() -> None:
    """End the watchdog of this rank: MPI is about to be finalized."""
    watchdog = here().watchdog
    if is_rank() and watchdog is not None:
        watchdog.stop()


def before_finalize() -> None:
    """What must happen before MPI is finalized."""
    say_farewell()
    stop_watching()


def call_last(function: Callable[[], None]) -> None:
    """Call `function()` at the exit of the interpreter, behind nearly all other exit functions."""
    _last.append(function)


def _at_exit() -> None:
    try:
        before_finalize()
    finally:
        if is_rank():
            for function in _last:
                function()


atexit.register(_at_exit)
