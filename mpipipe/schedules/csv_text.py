"""Schedules from CSV text in the cell grammar of PyTorch's pipeline schedules."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpipipe import files
from mpipipe.errors import ConfigError, ScheduleError
from mpipipe.schedules.action import Action, Order
from mpipipe.schedules.proof import check
from mpipipe.schedules.schedule import Schedule
from mpipipe.text import counted

SUFFIX = ".csv"
LISTED = 1 << 20  # actions; of so many `check` says which one is missing
MOST_BYTES = 1 << 26  # size of a file: no schedule that can be proven has more
SLICE = re.compile(r"\.([0-9]{1,99})")
CELL = re.compile(r"([0-9]{1,99})([FBIWR])([0-9]{1,99})(?:\.([0-9]{1,99}))?")
# a pair of actions that overlap, in one cell: `_Action.__repr__` in
# torch/distributed/pipelining/schedules.py
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
EXPECTED = (
    "<stage><op><micro-batch>[.<slice>] with op F, B (full backward), I (input gradient), W "
    "(weight gradient) or R (recomputation), as in 2F0"
)


def from_csv(text: str) -> Schedule:
    r"""Read a schedule: one row for each rank, one cell such as ``2F0`` for each action.

    Where sequences are cut into slices, all cells say theirs: ``2F0.1`` is slice 1 of micro-batch
    0. Empty cells are idle slots and are skipped. A cell ``(0F3;3B1)OVERLAP_F_B`` of PyTorch's
    DualPipeV has two actions: they run one after the other here, in that order. Which rank a stage
    lies on, and how many stages, micro-batches and slices there are, follows from the cells.
    `check` says whether the schedule can run; a Pipeline and `simulate` call it. What is not in the
    table, `dataclasses.replace(schedule, trained_from=...)` and `with_skips` set. `Schedule.to_csv`
    and PyTorch's compute-only dump write such tables. ScheduleError is raised where a cell is no
    action, a stage lies on two ranks, or has no actions.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    >>> schedule.ranks, schedule.microbatches
    (2, 2)
    """
    slices = 1 + max(map(int, SLICE.findall(text)), default=0)
    orders = [*_orders(text, slices)]
    # Empty rows at the end do not count.
    while orders and not orders[-1]:
        orders.pop()
    if not orders:
        raise ScheduleError(
            "the schedule is empty", expected="one row per rank, one cell like 2F0 per action"
        )
    microbatches = 1 + max(action.microbatch for order in orders for action in order) // slices
    placement = _placement(orders)
    actions = sum(map(len, orders))
    # Refused before each of them takes memory.
    if (needed := len(placement) * microbatches * slices) > max(actions, LISTED):
        raise ScheduleError(
            "most actions of the schedule are missing",
            found=f"{counted(actions, 'action')}, the highest micro-batch is {microbatches - 1}",
            expected=f"at least {needed}: an F of each micro-batch on each of "
            f"{counted(len(placement), 'stage')}",
            remedy="number the micro-batches from 0",
        )
    return Schedule("csv", placement, microbatches, orders, slices=slices)


def is_path(schedule: str) -> bool:
    """Whether what a user calls a schedule is the name of a file with a table."""
    return schedule.lower().endswith(SUFFIX)


def from_file(path: str | Path) -> Schedule:
    """Read a schedule from a file, and prove it.

    Raises ConfigError where it cannot be read, and ScheduleError, which names it, where it has no
    order that runs.
    """
    expected = f"{files.REGULAR} with a table, as `mpipipe simulate --out` writes it"
    with files.reading(
        "the order of the schedule",
        path,
        ConfigError,
        expected=expected,
        also=(UnicodeDecodeError,),
    ):
        text = files.read_text(path, MOST_BYTES)
    try:
        schedule = from_csv(text)
        check(schedule)
    except ScheduleError as error:
        error.message = f"{path}: {error.message}"
        raise
    return schedule


def _orders(text: str, slices: int) -> Iterator[Order]:
    """Yield the order of each rank; of a text that is none only the beginning is looked at."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        for rank, row in enumerate(rows):
            yield tuple(_actions(rank, row, slices))
    except csv.Error as error:
        raise ScheduleError(f"row {rows.line_num}: {error}", expected=EXPECTED) from error


def _actions(rank: int, row: Sequence[str], slices: int) -> Iterator[Action]:
    for column, cell in enumerate(row, 1):
        cell = cell.strip()
        if cell:
            parts = [cell]
            pair = OVERLAP.fullmatch(cell)
            if pair:
                parts = pair[1].split(";")
            for part in parts:
                yield _action(rank, column, part.strip(), slices)


def _action(rank: int, column: int, cell: str, slices: int) -> Action:
    match = CELL.fullmatch(cell)
    if match:
        stage, op, microbatch, part = match.groups()
        if part or slices == 1:
            return Action(int(stage), op, int(microbatch) * slices + int(part or 0))
    what = "not an action"
    remedy = "correct the cell, or leave it out where it is no computation"
    if match:
        what = "no slice, which other cells have"
        remedy = f"write {cell}.0, or the slice that it is"
    raise ScheduleError(
        f"row {rank + 1}, column {column}: {what}",
        rank=rank,
        found=f"{cell!r:.80}",
        expected=EXPECTED,
        remedy=remedy,
    )


def _placement(orders: Sequence[Order]) -> tuple[int, ...]:
    """Find the rank of each stage from where its first action stands."""
    home: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if home.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"row {rank + 1}: stage {action.stage} is on another rank than before",
                    rank=rank,
                    found=action,
                    expected="all actions of a stage in one row",
                )
    stages = len(home)
    if max(home) >= stages:
        absent = min(set(range(stages)).difference(home))
        raise ScheduleError(
            f"stage {absent} has no actions",
            stage=absent,
            found=f"{counted(stages, 'stage')}, the highest is {max(home)}",
            expected=f"stages 0 to {max(home)} without a gap",
            remedy="number the stages from 0",
        )
    return tuple(home[stage] for stage in range(stages))
