"""All ranks find at the same step that the job has to leave: by a signal, or in time.

    rank 0   step 7 | due()? no | step 8        | due()? yes | save | leave, exit code 75
    rank 1   step 7 | due()? no | step 8  USR2! | due()? yes | save | leave, exit code 75

One small agreement of all ranks is the question. Rank 0 alone looks at the clock, since clocks
differ.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from signal import Signals
from typing import NoReturn

from mpipipe.errors import ArgumentError
from mpipipe.job import rank_list, runtime
from mpipipe.job.context import finalized
from mpipipe.job.group import RankGroup, group_of
from mpipipe.job.report import abort_job, heading, turn, write
from mpipipe.job.stop_signals import StopSignals, parse_signals
from mpipipe.job.types import Communicator
from mpipipe.job.watch.dump import process_fields

PREEMPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
CALL = "Preemption.due"
ASKED = "Preemption.asked"
GRACE = 600.0
FOLLOWS = "the job leaves after the step under way; a second signal ends it at once"


class Preempted(SystemExit):
    """Ends the program of every rank with exit code 75, which is no failure.

    `agreed` are the ranks that raise it.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(PREEMPTED)
        self.agreed = frozenset(group.members)


class Preemption(StopSignals):
    """Says on all ranks at the same step that the job has to leave; a context manager.

    A scheduler that wants the nodes back sends a signal some time before it kills the job. From
    here on such a signal does not end this process. Instead `due()` is true on all ranks after it
    has reached any of them, and the loop can save and leave with exit code 75, by which a job
    script knows that it is to be started again. The constructor and `due` are collective.
    docs/checkpoints.md has a loop that leaves in time.

    Parameters
    ----------
    comm : communicator, optional
        The ranks, COMM_WORLD by default.
    signals : str
        Names such as "USR2,TERM", out of HUP, INT, QUIT, USR1, USR2, ALRM, TERM and XCPU; "none"
        for none. Ranks that are threads catch none.
    time_limit : float or str, optional
        How long this process may live: seconds, or HH:MM:SS or D-HH:MM:SS; 0 is no limit. By
        default the end of a job of SLURM, where SLURM_JOB_END_TIME names it. `due()` is true as
        soon as one step more, as long as the longest one so far, a save as long as the last one,
        and `margin` may not fit any more. Rank 0 decides.
    grace : float
        Seconds from the first signal after which the job ends at once, whatever it does, with exit
        code 128 plus the number of the signal. A second signal, more than two seconds after the
        first, ends it so as well.
    margin : float, optional
        Seconds; by default 2 % of the time that is left at the start, at least 2 s and at most 60
        s.
    say : callable, optional
        Takes lines of text on rank 0: at the first signal, in a thread, and at the end. By default
        they go to stderr.

    Attributes
    ----------
    code : int
        The exit code of a job that leaves: 75.
    reason : str
        Why `due()` was true; "" before.
    whereabouts : callable or None
        Returns how far the job is, for what is said at the first signal. Yours to set.

    Raises
    ------
    ArgumentError
        On every rank: a signal that cannot be caught, a time that is none, or a thread that is not
        the main one.
    """

    code = PREEMPTED

    def __init__(
        self,
        comm: Communicator | None = None,
        *,
        signals: str | Iterable[Signals] = "USR2,TERM",
        time_limit: float | str | None = None,
        grace: float = GRACE,
        margin: float | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        comm = runtime.resolve(comm)
        self.group = group_of(comm)
        self.reason = ""
        self.whereabouts: Callable[[], str] | None = None
        self._say = say or (lambda text: write(f"{text}\n"))
        with self.group.raise_together("making a Preemption"):
            for name, value in (("grace", grace), ("margin", margin)):
                if value is not None and not value >= 0:
                    raise ArgumentError(name, found=repr(value), expected="seconds, at least 0")
            numbers = parse_signals(signals)
            seconds = None
            if time_limit is not None:
                seconds = parse_duration(time_limit)
            self.time_limit = TimeLimit(seconds, margin)
            if runtime.in_process(comm):
                numbers = ()
            super().__init__(numbers, grace)

    def due(self, saving: bool = False) -> bool:
        """Find out on all ranks whether the job has to leave now; collective, after each step.

        Once true it stays so.

        `saving` says that a save is under way during the steps: the last one waits for it, and
        needs time of its own.
        """
        over = self.group.rank == 0 and self.time_limit.is_over(saving)
        return self._found(CALL, over)

    def asked(self) -> bool:
        """Find out on all ranks whether a signal has come; collective, before the first step.

        No time limit counts yet.

        Once it is true, `due()` is, too.
        """
        return self._found(ASKED, False)

    def _found(self, call: str, over: bool) -> bool:
        """Return whether any rank has got a signal, or has its time `over`."""
        if not self.reason:
            text = ""
            if self._first is not None:
                text = self._first.name
            if over:
                text = str(self.time_limit)
            if self.group.agree(call, values=[text != ""]).any():
                self.reason = self._reason_of(self.group.gather(call, text))
        return self.reason != ""

    def _reason_of(self, texts: list[str]) -> str:
        """Return one text of what each rank says."""
        reasons = []
        for text, ranks in rank_list.by_text(enumerate(texts)).items():
            if " " in text:
                reasons.append(text)
            elif text:
                reasons.append(f"{text} on {rank_list.named(ranks, self.group.size)}")
        return "; ".join(reasons)

    def saving(self) -> AbstractContextManager[None]:
        """Measure the block as a save, which is no part of a step."""
        return self.time_limit.saving()

    def save_took(self, seconds: float) -> None:
        """Note how long a save took that was written during the steps.

        The save of a job that leaves is waited for.

        These are `Saver.seconds` on rank 0, for example; what other ranks note counts for nothing.
        """
        self.time_limit.save = seconds

    def leave(self, text: str) -> NoReturn:
        """End the program of every rank with exit code 75, and say why; call it on all ranks.

        `text` says where the job has come to and what it has saved, as in "after step 7, saved as
        step-00000007".
        """
        self._leaving = True
        if self.group.rank == 0:
            self._announce(f"{self.reason}: left {text}")
        raise Preempted(self.group)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _announce(self, text: str) -> None:
        self._say("mpipipe: " + text.replace("\n", "\nmpipipe: "))

    # -- called by a thread ------------------------------------------------------------------------

    def _tell(self, name: str) -> None:
        """Say on rank 0 that a signal has come."""
        if self.group.rank == 0:
            place = "has come"
            if self.whereabouts is not None:
                place = self.whereabouts()
            self._announce(f"{name} {place}\n{FOLLOWS}")

    def _hopeless(self) -> bool:
        """Return whether another rank has died: its launcher then signals the others."""
        watchdog = self.group.context.watchdog
        if watchdog is None or self.reason or self._closed:
            return False
        return watchdog.neighbour_has_ended

    def _end(self, text: str, code: int) -> None:
        """End the job; the lowest rank that comes to it reports, where no other has."""
        world = self.group.world_rank
        time.sleep(turn(world))
        usable = not finalized() and runtime.threads_allowed()
        size = self.group.size
        if usable:
            size = runtime.world().size
        if text:
            write(f"{heading(world, size)}\n  {text}\n")
        if not usable:
            os._exit(code)
        abort_job(runtime.world(), code)


# -- When a job has to leave, to be done before its time is over: what the clock of rank 0 says ----
#
# now   longest step   last save   margin   end
#  |--------------|------------|--------|----|     as long as this fits, one step more is begun


# Seconds since 1970; set by SLURM from 23.02, by jobs/batch.sh for older ones.
END_TIME = "SLURM_JOB_END_TIME"
# of the time there is; seconds
SHARE = 0.02
LEAST_MARGIN = 2.0
MOST_MARGIN = 60.0
FORM = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d*)?)", re.ASCII)


def parse_duration(text: str | float) -> float:
    """Return seconds: of a number, or of MM:SS, HH:MM:SS or D-HH:MM:SS."""
    words = str(text).strip()
    with suppress(ValueError):
        seconds = float(words)
        if 0 <= seconds < float("inf"):
            return seconds
    parts = FORM.fullmatch(words)
    if parts is None:
        raise ArgumentError(
            "no length of time",
            found=repr(text),
            expected="seconds, MM:SS, HH:MM:SS or D-HH:MM:SS; 0 for no limit",
        )
    days, hours, minutes, seconds = map(float, parts.groups("0"))
    return 60 * (60 * (24 * days + hours) + minutes) + seconds


class TimeLimit:
    """The end of this job's time, and what fits before it.

    `seconds` count from the start of this process, 0 is no limit, None the time until
    SLURM_JOB_END_TIME, where that is set. `margin` are seconds to spare; by default 2 % of what is
    left now, at least 2 s and at most 60 s.
    """

    def __init__(self, seconds: float | None, margin: float | None = None) -> None:
        now = time.monotonic()
        slurm = os.environ.get(END_TIME, "")
        self.end: float | None = None  # time.monotonic() then; None without a limit
        if seconds is None and slurm.isdigit():
            self.end = now + int(slurm) - time.time()
        elif seconds:
            self.end = now - _age() + seconds
        if margin is None:
            margin = min(MOST_MARGIN, max(LEAST_MARGIN, SHARE * self._left(now)))
        self.margin = margin
        self.longest_step = 0.0  # without the first one, which has more to do
        self.save = margin  # seconds that the last one took; before the first one, a margin
        self._mark: float | None = None

    def _left(self, now: float) -> float:
        """Return the seconds until the end, 0 without a limit."""
        if self.end is None:
            return 0.0
        return max(0.0, self.end - now)

    def is_over(self, saving: bool = False) -> bool:
        """Return whether one more step and a save may not fit; call it once a step.

        With `saving`, a save is under way, which comes before.
        """
        now = time.monotonic()
        if self._mark is not None:
            self.longest_step = max(self.longest_step, now - self._mark)
        self._mark = now
        ready = now + self.longest_step + self.save + self.margin
        if saving:
            ready += self.save
        return self.end is not None and ready > self.end

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save: it is no part of a step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.save = time.monotonic() - start
            if self._mark is not None:
                self._mark += self.save

    def __str__(self) -> str:
        return f"the time limit, {self._left(time.monotonic()):.0f} s ahead"


def _age() -> float:
    """Return the seconds since this process was started; 0 where /proc does not say."""
    try:
        started = int(process_fields("self")[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
