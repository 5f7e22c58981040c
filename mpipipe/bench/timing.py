"""Side by side timing: candidates take turns in one run, and medians are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import TypeAlias

from mpipipe.cli.output import show
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator

Call: TypeAlias = "Callable[[], object]"  # what is measured


def compare(
    comm: Communicator, candidates: Sequence[Call], repeats: int, warmup: int = 3, before: Call | None = None
) -> list[float]:
    """Return the median seconds of each candidate. Of each turn the time of the slowest rank counts.

    What is called before each turn is not measured.
    """
    group = group_of(comm)
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(warmup + repeats):
        for candidate, measured in zip(candidates, times):
            if before is not None:
                before()
            group.agree("bench: the start of a turn")
            start = perf_counter()
            candidate()
            seconds = max(group.gather("bench: the seconds of a turn", perf_counter() - start))
            if turn >= warmup:
                measured.append(seconds)
    return [median(measured) for measured in times]


def report(comm: Communicator, name: str, measured: str, ratio: float | None = None, goal: str = "") -> None:
    """Print a line on rank 0: what was measured, and its ratio to its peer."""
    if comm.rank == 0:
        tail = "" if ratio is None else f"; ratio {ratio:.2f} ({goal})"
        show(f"{name}: {measured}{tail}\n")
