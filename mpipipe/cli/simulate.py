"""mpipipe simulate: a schedule on paper, and how far it is from the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from mpipipe import schedules
from mpipipe.cli.number_list import one_or_more
from mpipipe.cli.one_process import check_one_process
from mpipipe.comm.abort import Stop
from mpipipe.comm.report import describe
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.schedules import Costs, Links, Repetition, Schedule
from mpipipe.schedules.links import FORM
from mpipipe.schedules.registry import names, placement_of

REFUSED = 2  # exit code, as of a configuration that cannot be used
WHOLE = 1 << 21  # most forwards of a schedule that is simulated as a whole: it takes some seconds and 1 GB
SMALL_RANKS, SMALL_ORDER = 16, 60  # of larger ones no timeline is shown
Number = TypeVar("Number", int, float)
Cost = Annotated[str, typer.Option(help="time in each stage: a number, or one for each stage with commas between")]


def simulate(
    schedule: Annotated[
        str | None, typer.Option(help="a name; all: a table of them; search: look for the best", show_default=False)
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="P; default: 4", show_default=False)] = None,
    chunks: Annotated[int | None, typer.Option(help="V, stages on each rank; default: 1", show_default=False)] = None,
    microbatches: Annotated[int | None, typer.Option(help="M; default: 16", show_default=False)] = None,
    forward: Cost = "1",
    input_grad: Cost = "1",
    weight_grad: Cost = "1",
    transfer: Annotated[
        str, typer.Option(help="time of a message between stages: a number, or one for each stage")
    ] = "0",
    transfer_model: Annotated[
        str | None, typer.Option(help=f"in place of --transfer, in s and bytes/s: {FORM}", show_default=False)
    ] = None,
    message_bytes: Annotated[
        float, typer.Option(help="of one micro-batch between two stages, for --transfer-model")
    ] = 0,
    memory_limit: Annotated[
        float | None, typer.Option(help="chunk activations that a rank may hold at once", show_default=False)
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="of --schedule search; default: 10", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="of --schedule search; default: 0", show_default=False)] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="run forwards again, as many as --memory-limit needs; without it, all")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="read the order from this file", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="write the order to this new file", show_default=False)] = None,
) -> None:
    """Simulate a schedule: time, bubble, memory, distance from the best (python -m mpipipe simulate --schedule all).

    One process does it, without MPI. Without --memory-limit a schedule is compared with those that need no more memory
    than it does itself. Of very large schedules the part that repeats is simulated.
    """
    try:
        check_one_process("simulate")
        times = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "transfer": transfer}
        costs = Costs(*(one_or_more(option, text) for option, text in times.items()))
        if (schedule is None) == (csv is None):
            raise ConfigError(
                "what to simulate is not clear",
                found=f"schedule={schedule}, csv={csv}",
                expected="either --schedule or --csv",
            )
        if csv is not None:
            _refuse("--csv, whose order says it", ranks=ranks, chunks=chunks, microbatches=microbatches)
        if schedule != "search":
            _refuse("anything but --schedule search", seconds=seconds, seed=seed)
        if recompute and (schedule == "all" or (schedule == "search" and memory_limit is None)):
            raise ConfigError(
                "--recompute has nothing to keep",
                found=f"--schedule {schedule}, without a limit of its own",
                expected="a schedule, or --schedule search with --memory-limit",
            )
        ranks, chunks, microbatches = _filled(ranks, 4), _filled(chunks, 1), _filled(microbatches, 16)
        if out is not None and (out.exists() or not out.parent.is_dir() or schedule == "all"):
            raise ConfigError(
                "no order can be written there",
                found=str(out),
                expected="a new file in a folder that exists, for one schedule",
            )
        network = _network(transfer_model, message_bytes, costs)
        if csv is None and ranks * chunks * microbatches > WHOLE:
            if schedule in ("all", "search") or memory_limit is not None or recompute or out is not None:
                raise ConfigError(
                    "a schedule of this size is never made as a whole",
                    found=f"{ranks} ranks x {chunks} chunks x {microbatches} micro-batches",
                    expected=f"at most {WHOLE:,} forwards for all, search, --memory-limit, --recompute and --out",
                )
            found = schedules.simulate_repeated(
                str(schedule),
                ranks=ranks,
                chunks=chunks,
                microbatches=microbatches,
                costs=costs,
                links=network,
                message_bytes=message_bytes,
            )
            lines = [f"schedule    {schedule}: {ranks} ranks, {ranks * chunks} stages, {microbatches} micro-batches"]
            lines += _repeated(found)
        elif schedule == "all":
            lines = [*_table(ranks, chunks, microbatches, costs, memory_limit, network, message_bytes)]
        else:
            if network is not None:
                placement = _placement(schedule, csv, ranks, chunks, network)
                costs = replace(costs, transfer=network.times(placement, message_bytes))
            if csv is not None:
                made = schedules.from_csv(_text(csv))
            elif schedule == "search":
                options = {"chunks": chunks, "seconds": _filled(seconds, 10.0), "seed": _filled(seed, 0)}
                search = schedules.search_with_recompute if recompute else schedules.search
                made = search(ranks, microbatches, costs, memory_limit=memory_limit, **options)  # type: ignore[arg-type]
            else:
                made = schedules.by_name(
                    str(schedule),
                    ranks=ranks,
                    chunks=chunks,
                    microbatches=microbatches,
                    costs=costs,
                    memory_limit=None if recompute else memory_limit,
                )
            if recompute and schedule != "search":
                made = schedules.with_recompute(made, costs, memory_limit)
            lines = [*_one(made, costs, memory_limit)]
            if out is not None:
                lines.append(_written(made, out))
        for line in lines:
            typer.echo(line)
    except MpipipeError as error:
        raise Stop(describe(error, "mpipipe: nothing is simulated"), REFUSED) from error


def _network(text: str | None, message_bytes: float, costs: Costs) -> Links | None:
    """Give the links that --transfer-model names."""
    if text is None:
        if message_bytes:
            raise ConfigError(
                "the length of a message says nothing without a model of the links",
                found=f"--message-bytes={message_bytes:g}",
                remedy="pass --transfer-model latency,bandwidth as well",
            )
        return None
    if costs.transfer != 0:
        raise ConfigError(
            "messages have two costs",
            found=f"--transfer={costs.transfer} and --transfer-model={text}",
            expected="one of them",
        )
    network = Links.read(text)
    if not message_bytes and math.isfinite(network.bandwidth):
        raise ConfigError(
            "a bandwidth says nothing without the length of a message",
            found=f"--transfer-model={text}",
            expected="--message-bytes, or the bandwidth inf",
        )
    return network


def _placement(schedule: str | None, csv: Path | None, ranks: int, chunks: int, network: Links) -> tuple[int, ...]:
    """Say where stages lie, so that hops can have their times."""
    if csv is not None:
        return schedules.from_csv(_text(csv)).placement
    if schedule == "search" and chunks > 1:
        raise ConfigError(
            "a search chooses where stages lie, and their hops are not known before",
            found=f"--transfer-model with --schedule search and {chunks} chunks",
            remedy="give the time of each hop: --transfer",
        )
    return placement_of(str(schedule), ranks, chunks)


def _repeated(found: Repetition) -> Iterator[str]:
    yield f"makespan    {found.makespan:.6g}"
    yield f"bubble      {found.bubble_fraction:.4f} of all time, {found.bubble_ratio:.4f} of busy time"
    yield f"activations {found.peak_activations} on a rank, in chunks, at most"
    ranks, microbatches = found.sizes[-1]
    yield f"simulated   {len(found.sizes)} sizes to {ranks} ranks, {microbatches} micro-batches, and the rest repeats"


def _refuse(beside: str, **options: float | None) -> None:
    """Raise ConfigError where one of these options is given."""
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0].split()[0]} does not go with {beside}", found=", ".join(given), remedy="leave it out"
        )


def _filled(value: Number | None, default: Number) -> Number:
    return default if value is None else value


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


def _table(
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: float | None,
    network: Links | None,
    message_bytes: float,
) -> Iterator[str]:
    yield f"{'schedule':<24}{'makespan':>10}{'bubble':>8}{'activations':>12}{'bound':>10}{'gap':>8}"
    for name in names(chunks):
        if network is not None:
            costs = replace(costs, transfer=network.times(placement_of(name, ranks, chunks), message_bytes))
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
