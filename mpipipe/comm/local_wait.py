"""The wait of a rank for something of its own, such as one of its threads: it hears of failures, and is watched."""

from __future__ import annotations

from collections.abc import Callable

from mpipipe.comm.process import here
from mpipipe.comm.wait import Vigil

LOOK_SECONDS = 2e-3  # between two looks around


def wait_locally(ended: Callable[[float], bool], what: object) -> None:
    """Return once something of this rank itself has ended.

    Parameters
    ----------
    ended : callable
        `ended(seconds)` returns whether it has ended; it waits for that so long at most.
    what : object
        What the rank waits for, as something with a text. The watchdog blames a rank that waits for no other.

    Raises
    ------
    PeerError, StallError
        As for `wait.wait`.
    """
    if ended(0.0):
        return
    process = here()
    with Vigil(process, what) as vigil:
        while not ended(LOOK_SECONDS):
            process.advance()
            vigil.look()
