"""`bench schedules`: how long large schedules take to build, check and simulate."""

from __future__ import annotations

import sys
from time import perf_counter

from mpipipe import schedules

SIZES = (("interleaved_1f1b", 64, 4, 128), ("zero_bubble_h1", 64, 1, 512), ("one_f_one_b", 256, 1, 1024))


def run() -> None:
    """Print a line for each schedule."""
    for name, ranks, chunks, microbatches in SIZES:
        start = perf_counter()
        schedule = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
        built = perf_counter()
        schedules.check(schedule)
        checked = perf_counter()
        timeline = schedules.simulate(schedule)
        end = perf_counter()
        sys.stdout.write(
            f"schedules {name}: {chunks} chunks x {ranks} ranks x {microbatches} micro-batches: {end - start:.2f} s"
            f" (build {built - start:.2f}, check {checked - built:.2f}, simulate {end - checked:.2f}),"
            f" bubble {timeline.bubble_fraction:.4f}\n"
        )
