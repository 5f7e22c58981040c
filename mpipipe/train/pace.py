"""The pace of a training: elapsed time and time left, steps per second, and the clock in its records."""

from __future__ import annotations

import time


class Pace:
    """Counts the steps of one start of a training, and times them.

    Parameters
    ----------
    steps : steps of the whole training
    done : steps before this start

    Attributes
    ----------
    done : steps made so far
    """

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.before, self.done = steps, done, done
        self.begin()

    def begin(self) -> None:
        """Let the time begin now."""
        self.start = self.last = time.monotonic()

    def advance(self) -> None:
        """Count one more step."""
        self.done += 1

    def gone(self) -> float:
        """Seconds since this start."""
        return time.monotonic() - self.start

    def rate(self) -> float:
        """Steps per second since this start, including the time between steps; 0 before the first step."""
        return (self.done - self.before) / max(self.gone(), 1e-9)

    def timing(self) -> str:
        """Return the time since this start and the time left, in words."""
        rate, gone = self.rate(), duration(self.gone())
        left = self.steps - self.done
        return f"{gone}, {duration(left / rate)} left" if rate and left else gone

    def stamp(self) -> dict[str, float]:
        """Return the clock of a record: `time`, in seconds since 1970, and `seconds` since the record before it."""
        now, before = time.monotonic(), self.last
        self.last = now
        return {"time": round(time.time(), 3), "seconds": round(now - before, 6)}


def duration(seconds: float) -> str:
    """Write a time in two units at most: "12s", "4m10s", "2h03m", "3d04h".

    Parameters
    ----------
    seconds : float
        Not negative.

    Returns
    -------
    str
        The time, cut off below the smaller unit.

    Examples
    --------
    >>> from mpipipe.train.pace import duration
    >>> [duration(seconds) for seconds in (0.4, 250, 7399, 274_000)]
    ['0s', '4m10s', '2h03m', '3d04h']
    """
    whole = int(seconds)
    for unit, size, below, part in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02}{below}"
    return f"{whole}s"
