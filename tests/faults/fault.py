"""What one fault is: how its job starts, what breaks in it, and what must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

RUN, PLAIN = "run", "plain"
HEADING, ALONE = "mpipipe: job ended by", "mpipipe: stopped:"  # of every report: of several ranks, and of one
NONZERO = "not 0"
ANY = "any"


class Send(NamedTuple):
    """Send a signal to a rank, the "launcher" or its "group", `after` seconds after the job has printed "working"."""

    number: int
    to: int | str
    after: float = 0.0


@dataclass(frozen=True)
class Fault:
    """One row of the table; it stands for a job with each number of ranks in each mode."""

    name: str  # what breaks; unique
    kind: str  # the first word of its name, which chooses a class of faults
    script: str  # text of job.py
    modes: tuple[str, ...] = (RUN, PLAIN)  # python -m mpipipe run job.py, or python job.py
    ranks: tuple[int, ...] = (2, 4)  # 0 starts without a launcher
    mpi: str | None = None  # the only MPI that this fault is for
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of all ranks
    sends: tuple[Send, ...] = ()  # signals from outside
    code: int | str | tuple[int, ...] = 1  # exit code or codes in mode RUN; NONZERO and ANY say less
    plain_code: int | str | tuple[int, ...] | None = None  # and in mode PLAIN
    says: tuple[str, ...] = ()  # texts that stderr must hold; {last} is the last rank
    plain_says: tuple[str, ...] | None = None  # and in mode PLAIN
    never: tuple[str, ...] = ()  # texts that neither stdout nor stderr may hold
    by_all: tuple[str, ...] = ()  # texts that stdout must hold once for each rank
    reports: int | None = 1  # lines with HEADING or ALONE in mode RUN; None for any
    quiet: bool = False  # whether stderr must be empty
    limit: float = 20.0  # seconds until the job counts as hung
    quick: tuple[int, str] | None = None  # (ranks, mode) for the quick choice

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
