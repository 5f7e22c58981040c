"""A schedule that a configuration gives as a table of actions, not by its name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mpipipe import schedules
from mpipipe.errors import ConfigError
from mpipipe.schedules import Schedule
from mpipipe.schedules.csv_text import is_path
from mpipipe.text import counted


def is_table(schedule: str) -> bool:
    """Whether it is the table itself."""
    return not is_path(schedule) and ("," in schedule or "\n" in schedule)


def named(table: str) -> Schedule:
    """Read a table, and prove it; its name says which one it is."""
    schedule = schedules.from_csv(table)
    schedules.check(schedule)
    return replace(schedule, name=f"order {fingerprint(table)}")


def fingerprint(table: str) -> str:
    """Return eight digits that tell two tables apart."""
    return f"{schedules.from_csv(table).fingerprint:016x}"[:8]


def fitting(table: str, pipe: int, chunks: int, microbatches: int | None) -> Schedule:
    """Read a table for pipelines of `pipe` ranks; raises ConfigError if it is of other sizes."""
    schedule = named(table)
    stages = set(Counter(schedule.placement).values())
    for key, found, wanted in (
        ("pipe", schedule.ranks, pipe),
        ("chunks", schedule.chunks if len(stages) == 1 else 0, chunks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if wanted is not None and found != wanted:
            raise ConfigError(
                f"the order of the schedule is not of {key} = {wanted}",
                found=f"{counted(schedule.ranks, 'rank')} with {' or '.join(map(str, sorted(stages)))} stages each, "
                f"{counted(schedule.microbatches, 'micro-batch')}",
                expected=f"{key} = {wanted}, as the configuration and the job say",
                remedy=f"give {key} = {found}, or make an order of these sizes with `mpipipe simulate`"
                if found
                else "make an order with as many stages on each rank",
            )
    return schedule
