"""What one fault is: how its job starts, what breaks in it, and what must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

RUN, PLAIN, COMMAND = "run", "plain", "command"
HEADING, ALONE = "mpipipe: job ended by", "mpipipe: stopped:"  # of every report: of several ranks, and of one
NONZERO = "not 0"
ANY = "any"
AGREED = (0, 2, 75, 130)  # exit codes of jobs that end in order


class Send(NamedTuple):
    """Send signal `number` to a rank, the "launcher" or its "group", `after` seconds after the job prints `at`."""

    number: int
    to: int | str
    at: str = "working"
    after: float = 0.0


@dataclass(frozen=True)
class Fault:
    """One row of the table; it stands for a job with each number of ranks in each mode.

    Attributes
    ----------
    name : str
        What breaks; unique.
    kind : str
        The class that the summary counts it in.
    script : str or None
        Text of job.py; None where `arguments` stand in its place.
    arguments, arguments_of
        What follows `python` on every rank, and on single ranks.
    modes : tuple of str
        RUN (python -m mpipipe run job.py), PLAIN (python job.py) or COMMAND (python arguments).
    ranks : tuple of int
        Numbers of ranks; 0 starts without a launcher.
    mpi : str or None
        The only MPI that this fault is for.
    env, env_of
        Environment variables of all ranks, and of single ranks.
    folders : tuple of str
        Working folders, dealt out to the ranks in turn.
    before, after
        Lists of arguments for python, run alone in the job's folder; each must exit with 0.
    sends : tuple of Send
        Signals from outside.
    code, plain_code
        Exit code or codes in modes RUN and COMMAND, and in mode PLAIN; NONZERO and ANY say less.
    says, plain_says
        Texts that stderr must hold; {last} is the last rank.
    once : tuple of str
        Texts that stderr must hold exactly once, in modes RUN and COMMAND.
    prints, never
        Texts that stdout must hold, and that neither stdout nor stderr may hold.
    by_all : tuple of str
        Texts that stdout must hold once for each rank.
    reports : int or None
        Number of lines with HEADING or ALONE in modes RUN and COMMAND; None for any.
    quiet : bool
        Whether stderr must be empty.
    clean : bool or None
        Whether nothing may be left in /dev/shm; None: where the exit code is an agreed one.
    limit : float
        Seconds until the job counts as hung.
    repeat : int
        How often it is run.
    quick : (int, str) or None
        (ranks, mode) for the quick choice.
    slow : bool
        Whether it is skipped where only fast cases are wanted.
    """

    name: str
    kind: str
    script: str | None = None
    arguments: tuple[str, ...] = ()
    arguments_of: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    modes: tuple[str, ...] = (RUN, PLAIN)
    ranks: tuple[int, ...] = (2, 4)
    mpi: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_of: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[tuple[str, ...], ...] = ()
    sends: tuple[Send, ...] = ()
    code: int | str | tuple[int, ...] = 1
    plain_code: int | str | tuple[int, ...] | None = None
    says: tuple[str, ...] = ()
    plain_says: tuple[str, ...] | None = None
    once: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    by_all: tuple[str, ...] = ()
    reports: int | None = 1
    quiet: bool = False
    clean: bool | None = None
    limit: float = 20.0
    repeat: int = 1
    quick: tuple[int, str] | None = None
    slow: bool = False

    def cases(self) -> list[Case]:
        return [Case(self, ranks, mode) for ranks in self.ranks for mode in self.modes]


class Case(NamedTuple):
    """One job of a fault."""

    fault: Fault
    ranks: int
    mode: str

    def __str__(self) -> str:
        return f"{self.fault.kind}: {self.fault.name} [{self.ranks} {self.mode}]"

    @property
    def code(self) -> int | str | tuple[int, ...]:
        """The exit code or codes that must come out."""
        fault = self.fault
        if self.mode != PLAIN:
            return fault.code
        if fault.plain_code is not None:
            return fault.plain_code
        return fault.code if fault.code in (0, ANY) else NONZERO

    @property
    def says(self) -> list[str]:
        """Texts that stderr must hold."""
        plain = self.mode == PLAIN and self.fault.plain_says is not None
        texts = self.fault.plain_says if plain else self.fault.says
        return [text.replace("{last}", str(self.ranks - 1)) for text in texts or ()]

    @property
    def clean(self) -> bool:
        """Whether the job must leave nothing in /dev/shm."""
        return self.code in AGREED if self.fault.clean is None else self.fault.clean
