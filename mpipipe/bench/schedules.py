"""`bench schedules`: how long large schedules take: to build, check and simulate; and on one rank of a real job."""

from __future__ import annotations

import resource
import tracemalloc
from functools import partial
from time import perf_counter

from mpipipe import schedules
from mpipipe.cli.output import show
from mpipipe.pipeline import construct_on_paper
from mpipipe.schedules import Links, Schedule
from mpipipe.schedules.registry import names
from mpipipe.text import counted

RANKS, MICROBATCHES, CHUNKS = 64, 128, (4, 2, 1)  # of the table of all schedules
LARGE = (("one_f_one_b", 1024, 1, 4096), ("zero_bubble_2p", 1024, 1, 4096))
JOB = (("one_f_one_b", 1024, 1, 4096), ("interleaved_1f1b", 1024, 2, 4096), ("zero_bubble_h1", 1024, 1, 4096),
       ("zero_bubble_2p", 1024, 1, 4096), ("dualpipe_v", 1024, 2, 4096))  # fmt: skip
REPEATED = (("one_f_one_b", 16384, 1, 8192), ("interleaved_1f1b", 16384, 2, 8192), ("zero_bubble_h1", 16384, 1, 8192),
            ("interleaved_zero_bubble", 16384, 2, 8192), ("dualpipe_v", 16384, 2, 8192))  # fmt: skip


def run() -> None:
    """Print a line for each schedule."""
    for chunks in CHUNKS:
        for name in names(chunks):
            _whole(name, RANKS, chunks, MICROBATCHES)
    for job in JOB:
        _rank(*job)
    for size in REPEATED:
        _repeated(*size)
    for size in LARGE:
        _whole(*size)


def _say(name: str, ranks: int, chunks: int, microbatches: int, rest: str) -> None:
    size = f"{counted(chunks, 'chunk')} x {counted(ranks, 'rank')} x {counted(microbatches, 'micro-batch')}"
    show(f"schedules {name}: {size}: {rest}\n")


def _whole(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    start = perf_counter()
    schedule = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    built = perf_counter()
    schedules.check(schedule)
    checked = perf_counter()
    timeline = schedules.simulate(schedule)
    end = perf_counter()
    rest = f"{end - start:.2f} s (build {built - start:.2f}, check {checked - built:.2f}, simulate {end - checked:.2f})"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of this process, from KiB
    _say(name, ranks, chunks, microbatches, f"{rest}, bubble {timeline.bubble_fraction:.4f}, {peak:.2f} GiB so far")


def _rank(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    """One rank in the middle, which has two neighbours."""
    build = partial(schedules.by_name, name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    seconds, _ = _construction_cost(build, ranks // 2)
    tracemalloc.start()
    try:
        _, held = _construction_cost(build, ranks // 2)
    finally:
        tracemalloc.stop()
    _say(name, ranks, chunks, microbatches, f"one rank of a job: {seconds:.2f} s, {held / 2**20:.1f} MiB")


def _construction_cost(build: partial[Schedule], rank: int) -> tuple[float, int]:
    start = perf_counter()
    construct_on_paper(build, rank)
    return perf_counter() - start, tracemalloc.get_traced_memory()[1]


def _repeated(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    start = perf_counter()
    found = schedules.simulate_repeated(
        name,
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
        costs=schedules.Costs(2e-3, 2e-3, 2e-3),
        links=Links(latency=5e-6, bandwidth=25e9, node_size=8),
        message_bytes=1 << 24,
    )
    rest = f"by its repeated part: {perf_counter() - start:.2f} s, bubble {found.bubble_fraction:.4f}"
    _say(name, ranks, chunks, microbatches, rest)
