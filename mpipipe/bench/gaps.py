"""`bench gaps`: how far searched schedules are from the best, at most, for many sets of costs, and how long it took."""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

from mpipipe import schedules
from mpipipe.cli.output import show
from mpipipe.schedules import Costs

# F, I, W and a message in ms, from profiles of GPT models: Qi et al. 2023, arXiv:2401.10241, appendix
MODELS = {
    "1.5B": (18.522, 18.086, 9.337, 0.601),
    "6.2B": (29.718, 29.444, 19.927, 0.527),
    "14.6B": (11.347, 11.248, 8.132, 0.377),
    "28.3B": (10.419, 10.207, 7.715, 0.408),
}


class Shape(NamedTuple):
    """P, V, M, and the chunk activations that a rank may hold."""

    ranks: int
    chunks: int
    microbatches: int
    limit: int


SHAPES = (
    Shape(4, 1, 16, 4),  # the memory of 1F1B
    Shape(8, 1, 32, 8),
    Shape(8, 1, 16, 16),  # twice of it
    Shape(4, 2, 16, 6),  # V-Half's: about half of it
    Shape(8, 2, 32, 16),
    Shape(8, 2, 32, 10),
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


def run(seconds: float, shapes: tuple[Shape, ...] = SHAPES) -> None:
    """Print a line for each set, and how many reach the goal."""
    shares = []
    for shape in shapes:
        for name, costs in cost_sets(shape.ranks * shape.chunks):
            begin = perf_counter()
            found = schedules.search(
                shape.ranks, shape.microbatches, costs, chunks=shape.chunks, memory_limit=shape.limit, seconds=seconds
            )
            took = perf_counter() - begin
            share, makespan, bound = schedules.gap(found, costs, shape.limit)
            shares.append(share)
            place = "on a V" if shape.chunks == 2 and found.placement[-1] == 0 else "looped"
            show(
                f"gaps P={shape.ranks} V={shape.chunks} M={shape.microbatches}, {shape.limit} activations, {name}:"
                f" {share:.2%} (makespan {makespan:.6g}, bound {bound:.6g}, {place}), {took:.1f} s\n"
            )
    reached = sum(share <= GOAL for share in shares)
    show(
        f"gaps: {reached} of {len(shares)} sets within {GOAL:.0%},"
        f" median {median(shares):.2%}, largest {max(shares):.2%}\n"
    )
