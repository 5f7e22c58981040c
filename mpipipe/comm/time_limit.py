"""When a job has to leave, to be done before its time is over: what the clock of rank 0 says.

now   longest step   last save   margin   end
 |--------------|------------|--------|----|     as long as this fits, one step more is begun
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpipipe.errors import ArgumentError

END_TIME = "SLURM_JOB_END_TIME"  # seconds since 1970; set by SLURM from 23.02 on, by site/job.sh for older ones
SHARE, LEAST_MARGIN, MOST_MARGIN = 0.02, 2.0, 60.0  # of the time there is; seconds
FORM = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d*)?)", re.ASCII)


def parse_duration(text: str | float) -> float:
    """Return seconds: of a number of them, or of MM:SS, HH:MM:SS or D-HH:MM:SS as SLURM writes a time.

    Raises ArgumentError for anything else.
    """
    words = str(text).strip()
    with suppress(ValueError):
        seconds = float(words)
        if 0 <= seconds < float("inf"):
            return seconds
    found = FORM.fullmatch(words)
    if found is None or (found["days"] and not found["hours"]):
        raise ArgumentError(
            "no length of time", found=repr(text), expected="seconds, MM:SS, HH:MM:SS or D-HH:MM:SS; 0 for no limit"
        )
    minutes = 60 * (24 * int(found["days"] or 0) + int(found["hours"] or 0)) + int(found["minutes"])
    return 60 * minutes + float(found["seconds"])


class TimeLimit:
    """The end of this job's time, and what fits before it.

    Parameters
    ----------
    seconds : float or None
        From the start of this process; 0 for no limit. None: until SLURM_JOB_END_TIME, where that is set.
    margin : float or None
        Seconds to spare; by default 2 % of what is left now, at least 2 s and at most 60 s.

    Attributes
    ----------
    end : float or None
        On the clock of time.monotonic(); None without a limit.
    longest_step, last_save : float
        Seconds. The first step is not among them: it has more to do.
    """

    def __init__(self, seconds: float | None, margin: float | None = None) -> None:
        now = time.monotonic()
        self.end = _slurm_end(now) if seconds is None else now - _age() + seconds if seconds else None
        left = 0.0 if self.end is None else max(0.0, self.end - now)
        self.margin = min(MOST_MARGIN, max(LEAST_MARGIN, SHARE * left)) if margin is None else margin
        self.longest_step = 0.0
        self.last_save: float | None = None
        self._mark: float | None = None

    def is_over(self, saving: bool = False) -> bool:
        """Whether one step more, and a save behind it, may not fit; `saving`: behind the one that is under way.

        Called after each step.
        """
        now = time.monotonic()
        if self._mark is not None:
            self.longest_step = max(self.longest_step, now - self._mark)
        self._mark = now
        return self.end is not None and now + self.lead + (self.save if saving else 0.0) > self.end

    @property
    def lead(self) -> float:
        """Seconds that one step more, a save and the margin take."""
        return self.longest_step + self.save + self.margin

    @property
    def save(self) -> float:
        """Seconds that a save takes, as far as is known; before the first one it counts as a margin."""
        return self.margin if self.last_save is None else self.last_save

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save: it is no part of a step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.last_save = time.monotonic() - start
            if self._mark is not None:
                self._mark += self.last_save

    def save_took(self, seconds: float) -> None:
        """Remember how long a save took that was written beside the steps."""
        self.last_save = seconds

    def __str__(self) -> str:
        left = 0.0 if self.end is None else self.end - time.monotonic()
        return f"the time limit, {max(0.0, left):.0f} s ahead"


def _slurm_end(now: float) -> float | None:
    text = os.environ.get(END_TIME, "")
    return now + int(text) - time.time() if text.isdigit() else None


def _age() -> float:
    """Seconds since this process was started; 0 where /proc does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
