"""mpipipe simulate: a schedule on paper, and how far it is from the best."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from mpipipe import schedules
from mpipipe.cli.flags import Flag
from mpipipe.cli.one_process import check_one_process
from mpipipe.comm.abort import Stop
from mpipipe.comm.report import describe
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.schedules import Costs, Schedule
from mpipipe.schedules.registry import names

REFUSED = 2  # exit code, as of a configuration that cannot be used
SMALL_RANKS, SMALL_ORDER = 16, 60  # of larger ones no timeline is shown
Cost = Annotated[str, Flag("time in each stage: a number, or one for each stage with commas between")]


def simulate(
    schedule: Annotated[str | None, Flag("a name; all: a table of them; search: look for the best")] = None,
    ranks: Annotated[int, Flag("P")] = 4,
    chunks: Annotated[int, Flag("V, stages on each rank")] = 1,
    microbatches: Annotated[int, Flag("M")] = 16,
    forward: Cost = "1",
    input_grad: Cost = "1",
    weight_grad: Cost = "1",
    transfer: Annotated[str, Flag("time of a message between stages: a number, or one for each stage")] = "0",
    memory_limit: Annotated[float | None, Flag("chunk activations that a rank may hold at once")] = None,
    seconds: Annotated[float, Flag("of --schedule search")] = 10.0,
    seed: Annotated[int, Flag("of --schedule search")] = 0,
    csv: Annotated[Path | None, Flag("read the order from this file")] = None,
    out: Annotated[Path | None, Flag("write the order to this new file")] = None,
) -> None:
    """Simulate a schedule: time, bubble, memory, distance from the best (python -m mpipipe simulate --schedule all).

    One process does it, without MPI. Without --memory-limit a schedule is compared with those that need no more memory
    than it does itself.
    """
    try:
        check_one_process("simulate")
        costs = Costs(*map(_times, (forward, input_grad, weight_grad, transfer)))
        if (schedule is None) == (csv is None):
            raise ConfigError(
                "what to simulate is not clear",
                found=f"schedule={schedule}, csv={csv}",
                expected="either --schedule or --csv",
            )
        if out is not None and (out.exists() or not out.parent.is_dir() or schedule == "all"):
            raise ConfigError(
                "no order can be written there",
                found=str(out),
                expected="a new file in a folder that exists, for one schedule",
            )
        if schedule == "all":
            lines = [*_table(ranks, chunks, microbatches, costs, memory_limit)]
        else:
            if csv is not None:
                made = schedules.from_csv(_text(csv))
            elif schedule == "search":
                made = schedules.search(
                    ranks, microbatches, costs, chunks=chunks, memory_limit=memory_limit, seconds=seconds, seed=seed
                )
            else:
                made = schedules.by_name(
                    str(schedule),
                    ranks=ranks,
                    chunks=chunks,
                    microbatches=microbatches,
                    costs=costs,
                    memory_limit=memory_limit,
                )
            lines = [*_one(made, costs, memory_limit)]
            if out is not None:
                lines.append(_written(made, out))
        for line in lines:
            print(line)
    except MpipipeError as error:
        raise Stop(describe(error, "mpipipe: nothing is simulated"), REFUSED) from error


def _times(text: str) -> float | list[float]:
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError("a cost is no number", found=repr(text), expected="as in 1.5, or 1,1,2 for stages") from error
    return times[0] if len(times) == 1 else times


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the order cannot be read", found=f"{path}: {error}", expected="a table of text") from error


def _written(made: Schedule, path: Path) -> str:
    try:
        path.write_text(made.to_csv(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the order cannot be written: {error.strerror}", found=str(path)) from error
    return f"order       {path}"


def _one(made: Schedule, costs: Costs, memory_limit: float | None) -> Iterator[str]:
    found = schedules.simulate(made, costs)
    held = max(found.peak_activations)
    limit = memory_limit if memory_limit is not None else held or None
    share, makespan, bound = schedules.gap(made, costs, limit)
    yield f"schedule    {made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} micro-batches"
    yield f"makespan    {makespan:.6g}"
    yield f"bubble      {found.bubble_fraction:.4f} of all time, {found.bubble_ratio:.4f} of busy time"
    yield f"activations {' '.join(map(str, found.peak_activations))} on each rank, in chunks, at most"
    if made.recomputed:
        room = " that runs as many forwards again"
    else:
        room = "" if limit is None else f" with {limit:g} activations on each rank"
    yield f"bound       {bound:.6g}: no schedule of these stages is faster{room}"
    yield f"gap         {share:.2%} of the bound: the best one is no farther away"
    if made.ranks <= SMALL_RANKS and max(map(len, made.orders)) <= SMALL_ORDER:
        yield schedules.timeline(made, costs)


def _table(ranks: int, chunks: int, microbatches: int, costs: Costs, memory_limit: float | None) -> Iterator[str]:
    yield f"{'schedule':<24}{'makespan':>10}{'bubble':>8}{'activations':>12}{'bound':>10}{'gap':>8}"
    for name in names(chunks):
        made = schedules.by_name(
            name, ranks=ranks, chunks=chunks, microbatches=microbatches, costs=costs, memory_limit=memory_limit
        )
        found = schedules.simulate(made, costs)
        held = max(found.peak_activations)
        row = f"{name:<24}{found.makespan:>10.6g}{found.bubble_fraction:>8.4f}{held:>12}"
        if memory_limit is not None and held > memory_limit:
            yield f"{row}  above the limit of {memory_limit:g}"
        else:
            share, _, bound = schedules.gap(made, costs, memory_limit if memory_limit is not None else held)
            yield f"{row}{bound:>10.6g}{share:>8.2%}"
