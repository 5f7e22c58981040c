"""mpipipe simulate: a schedule on paper, and how far it is from the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from mpipipe import files, schedules
from mpipipe.cli.output import refusing, show_lines
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.options import Option, Values
from mpipipe.schedules import COLUMNS, Costs, Schedule, Timeline, from_file, is_path, names
from mpipipe.text import counted

Cost = Annotated[
    str, Option("time in each stage: a number, or one for each stage with commas between")
]


def simulate(
    schedule: Annotated[str, Option("a name; all: a table of them; FILE.csv")],
    ranks: Annotated[int | None, Option("P; default: 4")] = None,
    chunks: Annotated[int | None, Option("V, stages on each rank; default: 1")] = None,
    microbatches: Annotated[int | None, Option("M; default: 16")] = None,
    slices: Annotated[
        int | None, Option("n, slices of each sequence, whose times the costs are; default: 1")
    ] = None,
    forward: Cost = "1",
    input_grad: Cost = "1",
    weight_grad: Cost = "1",
    transfer: Annotated[
        str, Option("time of a message between stages: a number, or one for each stage")
    ] = "0",
    memory_limit: Annotated[
        float | None, Option("chunk activations that a rank may hold at once")
    ] = None,
    recompute: Annotated[
        bool, Option("recompute forwards, as many as --memory-limit needs; without it, all")
    ] = False,
    out: Annotated[Path | None, Option("write the order to this new file")] = None,
) -> None:
    """Simulate a schedule: time, bubble, memory, distance from the best.

    An example: python -m mpipipe simulate --schedule all. It runs in one process, without MPI.
    Without --memory-limit a schedule is compared with schedules that need no more memory than it.
    """
    with refusing("simulate"):
        sizes = without_none(ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices)
        costs = costs_of(forward, input_grad, weight_grad, transfer)
        make = partial(schedule_of, sizes=sizes, costs=costs)
        if schedule == "all":
            refuse("--schedule all", without_none(recompute=recompute or None, out=out))
            lines = [*_table(make, costs, chunks or 1, memory_limit)]
        else:
            if out is not None:
                files.check_new("the order", out)
            made = make(schedule, limit=None if recompute else memory_limit)
            if recompute:
                made = schedules.with_recompute(made, costs, memory_limit)
            lines = [*_one(made, costs, memory_limit)]
            if out is not None:
                with files.writing("the order", out):
                    out.write_text(made.to_csv(), encoding="utf-8")
                lines.append(f"order       {out}")
    show_lines(lines)


# Of a schedule whose sizes are not given.
SIZES = {"ranks": 4, "chunks": 1, "microbatches": 16, "slices": 1}


def schedule_of(
    name: str, sizes: dict[str, Any], costs: Costs, limit: float | None = None
) -> Schedule:
    """Return the schedule of a name or a file."""
    if is_path(name):
        refuse(f"--schedule {name}, whose order says it", sizes)
        return from_file(name)
    return schedules.by_name(name, **(SIZES | sizes), costs=costs, memory_limit=limit)


def without_none(**options: object) -> Values:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def costs_of(*texts: str) -> Costs:
    """Read costs, each as one number for all stages, or one for each of them."""
    options = ("forward", "input-grad", "weight-grad", "transfer")
    costs = []
    for option, text in zip(options, texts):
        try:
            times = [*map(float, text.split(","))]
        except ValueError as error:
            raise ConfigError(
                f"--{option} is no list of numbers",
                found=repr(text),
                expected="a number, or several as in 4,8,16",
            ) from error
        costs.append(times[0] if len(times) == 1 else times)
    return Costs(*costs)


def refuse(beside: str, options: dict[str, object]) -> None:
    """Raise ConfigError if one of these options has a value."""
    if options:
        raise ConfigError(
            f"--{next(iter(options))} does not go with {beside}",
            found=", ".join(f"--{name} {value}" for name, value in options.items()),
            remedy="leave it out",
        )


# -- The lines of text that show one schedule, or all of them --------------------------------------


# Of larger ones no timeline is shown.
SMALL_RANKS = 16
SMALL_ORDER = 60


def _one(made: Schedule, costs: Costs, memory_limit: float | None) -> Iterator[str]:
    result = schedules.simulate(made, costs)
    limit = memory_limit
    if limit is None:
        limit = max(result.peak_activations) or None
    bound, gap = _bound_and_gap(result, costs, limit)
    activations = " ".join(map(str, result.peak_activations))
    unit = "chunks"
    if made.slices > 1:
        unit = "chunks of slices"
    yield (
        f"schedule    {made.name}: {counted(made.ranks, 'rank')}, "
        f"{counted(made.stages, 'stage')}, {made.batch}"
    )
    yield f"makespan    {result.makespan:.6g}"
    yield (
        f"bubble      {result.bubble_fraction:.2%} of all time, {result.bubble_ratio:.2%} of busy "
        "time"
    )
    yield f"activations {activations} on each rank, in {unit}, at most"
    room = ""
    if made.recomputed:
        room = " that runs as many forwards again"
    elif limit is not None:
        plural = "s" * (limit != 1)
        room = f" with {limit:g} activation{plural} on each rank"
    yield f"bound       {bound:.6g}: no schedule of these stages is faster{room}"
    yield f"gap         at most {gap:.2%} slower than the best possible schedule"
    if made.ranks <= SMALL_RANKS and max(map(len, made.orders)) <= SMALL_ORDER:
        label = len(f"rank {made.ranks - 1} ")
        columns = shutil.get_terminal_size((COLUMNS + label, 0)).columns - label
        yield schedules.timeline(made, costs, max(1, min(COLUMNS, columns)))


def _bound_and_gap(timeline: Timeline, costs: Costs, limit: float | None) -> tuple[float, float]:
    """Return the time that no schedule beats, and by which share of it this one is longer."""
    peak = max(timeline.peak_activations)
    if limit is not None and peak > limit:
        rank = timeline.peak_activations.index(peak)
        raise ArgumentError(
            "the schedule does not keep the memory limit",
            found=f"{counted(peak, 'activation')} on rank {rank}",
            expected=f"at most {limit:g}",
            remedy=f"--memory-limit {peak}, or another schedule",
        )
    bound = schedules.lower_bound(timeline.schedule, costs, limit)
    return bound, max(0.0, timeline.makespan / bound - 1) if bound else 0.0


def _table(
    make: Callable[..., Schedule], costs: Costs, chunks: int, memory_limit: float | None
) -> Iterator[str]:
    yield f"{'schedule':<24}{'makespan':>10}{'bubble':>8}{'activations':>12}{'bound':>10}{'gap':>8}"
    for name in names(chunks):
        result = schedules.simulate(make(name, limit=memory_limit), costs)
        peak = max(result.peak_activations)
        limit = memory_limit
        if limit is None:
            limit = peak
        row = f"{name:<24}{result.makespan:>10.6g}{result.bubble_fraction:>8.4f}{peak:>12}"
        if peak > limit:
            yield f"{row}  above the limit of {limit:g}"
        else:
            bound, gap = _bound_and_gap(result, costs, limit)
            yield f"{row}{bound:>10.6g}{gap:>8.2%}"
