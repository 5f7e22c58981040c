"""Large schedules, and how far searched ones are from the best."""

from __future__ import annotations

import random
import resource
import tracemalloc
from collections.abc import Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any

from mpipipe import schedules
from mpipipe.cli import show
from mpipipe.options import Option
from mpipipe.pipeline import construct_on_paper
from mpipipe.schedules import Costs, Links, names
from mpipipe.text import counted

# -- `bench schedules`: how long large schedules take: to build, check and simulate; and on one rank of a real job -----


RANKS, MICROBATCHES, CHUNKS = 64, 128, (4, 2, 1)  # of the table of all schedules
LARGE = (("one_f_one_b", 1024, 1, 4096), ("zero_bubble_2p", 1024, 1, 4096))
JOB = (("one_f_one_b", 1024, 1, 4096), ("interleaved_1f1b", 1024, 2, 4096), ("zero_bubble_h1", 1024, 1, 4096),
       ("zero_bubble_2p", 1024, 1, 4096), ("dualpipe_v", 1024, 2, 4096))  # fmt: skip
REPEATED = (("one_f_one_b", 16384, 1, 8192), ("interleaved_1f1b", 16384, 2, 8192), ("zero_bubble_h1", 16384, 1, 8192),
            ("interleaved_zero_bubble", 16384, 2, 8192), ("dualpipe_v", 16384, 2, 8192))  # fmt: skip


def large() -> None:
    """Building, checking and simulating large schedules (python -m mpipipe bench schedules)."""
    whole = [(name, RANKS, chunks, MICROBATCHES) for chunks in CHUNKS for name in names(chunks)]
    for measure, sizes in ((_whole, whole), (_rank, JOB), (_repeated, REPEATED), (_whole, LARGE)):
        for name, ranks, chunks, microbatches in sizes:
            measured = measure(name, dict(ranks=ranks, chunks=chunks, microbatches=microbatches))
            size = f"{counted(chunks, 'chunk')} x {counted(ranks, 'rank')} x {counted(microbatches, 'micro-batch')}"
            show(f"schedules {name}: {size}: {measured}\n")


def _whole(name: str, sizes: dict[str, Any]) -> str:
    start = perf_counter()
    schedule = schedules.by_name(name, **sizes)
    built = perf_counter()
    schedules.check(schedule)
    checked = perf_counter()
    bubble = schedules.simulate(schedule).bubble_fraction
    end = perf_counter()
    took = f"{end - start:.2f} s (build {built - start:.2f}, check {checked - built:.2f}, simulate {end - checked:.2f})"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of this process, from KiB
    return f"{took}, bubble {bubble:.4f}, {peak:.2f} GiB so far"


def _rank(name: str, sizes: dict[str, Any]) -> str:
    """Measure one rank in the middle, which has two neighbours: its seconds, then its memory, which slows it down."""
    build = partial(schedules.by_name, name, **sizes)
    start = perf_counter()
    construct_on_paper(build, sizes["ranks"] // 2)
    seconds = perf_counter() - start
    tracemalloc.start()
    try:
        construct_on_paper(build, sizes["ranks"] // 2)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return f"one rank of a job: {seconds:.2f} s, {held / 2**20:.1f} MiB"


def _repeated(name: str, sizes: dict[str, Any]) -> str:
    start, links = perf_counter(), Links(latency=5e-6, bandwidth=25e9, node_size=8)
    timeline = schedules.simulate_repeated(
        name, **sizes, costs=Costs(2e-3, 2e-3, 2e-3), links=links, message_bytes=1 << 24
    )
    return f"by its repeated part: {perf_counter() - start:.2f} s, bubble {timeline.bubble_fraction:.4f}"


# -- `bench gaps`: how far searched schedules are from the best, at most, for many sets of costs, and how long it took -

# F, I, W and a message in ms, from profiles of GPT models: Qi et al. 2023, arXiv:2401.10241, appendix
MODELS = {
    "1.5B": (18.522, 18.086, 9.337, 0.601),
    "6.2B": (29.718, 29.444, 19.927, 0.527),
    "14.6B": (11.347, 11.248, 8.132, 0.377),
    "28.3B": (10.419, 10.207, 7.715, 0.408),
}


# P, V, M, and the chunk activations that a rank may hold
SHAPES = (
    (4, 1, 16, 4),  # the memory of 1F1B
    (8, 1, 32, 8),
    (8, 1, 16, 16),  # twice of it
    (4, 2, 16, 6),  # V-Half's: about half of it
    (8, 2, 32, 16),
    (8, 2, 32, 10),
)
GOAL = 0.02


def cost_sets(stages: int) -> Iterator[tuple[str, Costs]]:
    """Yield names and costs: equal, four models, uneven stages, slow links."""
    yield "equal", Costs()
    for name, times in MODELS.items():
        yield name, Costs(*times)
    last, ends = [1] * (stages - 1) + [1.5], [0.5] + [1] * (stages - 2) + [1.5]
    yield "long last stage", Costs(last, last, last, 0.05)
    yield "short first, long last", Costs(ends, ends, ends, 0.05)
    draw = random.Random(1)
    uneven = [draw.uniform(0.7, 1.3) for _ in range(stages)]
    yield "uneven", Costs(uneven, [1.1 * time for time in uneven], [0.8 * time for time in uneven], 0.05)
    yield "links half as slow as F", Costs(transfer=0.5)
    yield "links as slow as F", Costs(transfer=1)
    yield "one link 3 F", Costs(transfer=[3 if stage == stages // 2 else 0.1 for stage in range(stages)])


def gaps(seconds: Annotated[float, Option("to search for each set of costs")] = 60.0) -> None:
    """How far searched schedules are from the best, for many sets of costs (python -m mpipipe bench gaps)."""
    shares = []
    for ranks, chunks, microbatches, limit in SHAPES:
        for name, costs in cost_sets(ranks * chunks):
            begin = perf_counter()
            schedule = schedules.search(ranks, microbatches, costs, chunks=chunks, memory_limit=limit, seconds=seconds)
            took = perf_counter() - begin
            share, makespan, bound = schedules.gap(schedule, costs, limit)
            shares.append(share)
            place = "on a V" if chunks == 2 and schedule.placement[-1] == 0 else "looped"
            show(
                f"gaps P={ranks} V={chunks} M={microbatches}, {limit} activations, {name}:"
                f" {share:.2%} (makespan {makespan:.6g}, bound {bound:.6g}, {place}), {took:.1f} s\n"
            )
    reached = sum(share <= GOAL for share in shares)
    show(
        f"gaps: {reached} of {len(shares)} sets within {GOAL:.0%},"
        f" median {median(shares):.2%}, largest {max(shares):.2%}\n"
    )
