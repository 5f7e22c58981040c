"""Side by side timing: candidates take turns in one run, and medians are compared."""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter

from mpipipe.comm.group import group_of


def compare(comm, candidates, repeats: int, warmup: int = 3) -> list[float]:
    """Median seconds of each candidate (a function of no arguments), the slowest rank's time of each turn counting."""
    group = group_of(comm)
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(warmup + repeats):
        for candidate, kept in zip(candidates, times):
            group.agree("bench: the start of a turn")
            start = perf_counter()
            candidate()
            seconds = max(group.gather("bench: the seconds of a turn", perf_counter() - start))
            if turn >= warmup:
                kept.append(seconds)
    return [median(kept) for kept in times]


def report(comm, name: str, measured: str, ratio: float | None = None, goal: str = ""):
    """One line on rank 0: what was measured, and how it stands to its peer."""
    if comm.rank == 0:
        tail = "" if ratio is None else f"; ratio {ratio:.2f} ({goal})"
        sys.stdout.write(f"{name}: {measured}{tail}\n")
        sys.stdout.flush()
