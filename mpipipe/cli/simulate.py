"""mpipipe simulate: a schedule on paper, and how far it is from the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from mpipipe import files, schedules
from mpipipe.cli.flags import one_or_more
from mpipipe.cli.output import check_one_process, refusing, show
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.options import Option
from mpipipe.schedules import FORM, Costs, Links, Repetition, Schedule, from_file, is_path, names, placement_of
from mpipipe.text import counted, text_table

Number = TypeVar("Number", int, float)
Cost = Annotated[str, Option("time in each stage: a number, or one for each stage with commas between")]


def simulate(
    schedule: Annotated[str | None, Option("a name; all: a table of them; search: look for the best; FILE.csv")] = None,
    ranks: Annotated[int | None, Option("P; default: 4")] = None,
    chunks: Annotated[int | None, Option("V, stages on each rank; default: 1")] = None,
    microbatches: Annotated[int | None, Option("M; default: 16")] = None,
    forward: Cost = "1",
    input_grad: Cost = "1",
    weight_grad: Cost = "1",
    transfer: Annotated[str, Option("time of a message between stages: a number, or one for each stage")] = "0",
    transfer_model: Annotated[str | None, Option(f"in place of --transfer, in s and bytes/s: {FORM}")] = None,
    message_bytes: Annotated[float, Option("of one micro-batch between two stages, for --transfer-model")] = 0,
    memory_limit: Annotated[float | None, Option("chunk activations that a rank may hold at once")] = None,
    seconds: Annotated[float | None, Option("of --schedule search; default: 10")] = None,
    seed: Annotated[int | None, Option("of --schedule search; default: 0")] = None,
    recompute: Annotated[bool, Option("run forwards again, as many as --memory-limit needs; without it, all")] = False,
    csv: Annotated[Path | None, Option("read the order from this file, which may have any name")] = None,
    out: Annotated[Path | None, Option("write the order to this new file")] = None,
) -> None:
    """Simulate a schedule: time, bubble, memory, distance from the best (python -m mpipipe simulate --schedule all).

    It runs in one process, without MPI. Without --memory-limit a schedule is compared with schedules that need no more
    memory than it does. Of a very large schedule only the part that repeats is simulated.
    """
    with refusing():
        check_one_process("simulate")
        if (schedule is None) == (csv is None):
            raise ConfigError(
                "what to simulate is not clear",
                found="neither --schedule nor --csv" if schedule is None else "--schedule and --csv",
                expected="one of them",
                remedy="for example --schedule all, which compares all that the package makes",
            )
        source = "--csv"
        if schedule is not None and is_path(schedule):
            source, csv, schedule = f"--schedule {schedule}", Path(schedule), None
        if csv is not None:
            _refuse(f"{source}, whose order says it", ranks=ranks, chunks=chunks, microbatches=microbatches)
        if schedule != "search":
            _refuse("anything but --schedule search", seconds=seconds, seed=seed)
        times = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "transfer": transfer}
        costs = Costs(*(one_or_more(option, text) for option, text in times.items()))
        asked = SimulationRequest(
            schedule,
            csv,
            {"ranks": _filled(ranks, 4), "chunks": _filled(chunks, 1), "microbatches": _filled(microbatches, 16)},
            costs,
            _network(transfer_model, message_bytes, costs),
            message_bytes=message_bytes,
            memory_limit=memory_limit,
            search={"seconds": _filled(seconds, 10.0), "seed": _filled(seed, 0)},
            recompute=recompute,
            out=out,
        )
        asked.check()
        lines = [*asked.answer()]
    show("".join(f"{line}\n" for line in lines))


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


def _refuse(beside: str, **options: float | None) -> None:
    """Raise ConfigError if one of these options is given."""
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0].split()[0]} does not go with {beside}", found=", ".join(given), remedy="leave it out"
        )


def _filled(value: Number | None, default: Number) -> Number:
    return default if value is None else value


# -- What `mpipipe simulate` does: one schedule, all of them, or the repeated part of a large one, as lines of text ---


WHOLE = 1 << 21  # most forwards of a schedule that is simulated as a whole: it takes some seconds and 1 GB
SMALL_RANKS, SMALL_ORDER = 16, 60  # of larger ones no timeline is shown


@dataclass(frozen=True)
class SimulationRequest:
    """What is to be simulated."""

    schedule: str | None  # a name, all, or search
    csv: Path | None  # or a file with an order
    sizes: dict[str, int]  # ranks, chunks and microbatches
    costs: Costs
    network: Links | None  # from which messages have their times
    message_bytes: float
    memory_limit: float | None  # chunk activations that a rank may hold
    search: dict[str, Any]  # seconds and seed
    recompute: bool  # whether forwards are run again
    out: Path | None  # new file for the order

    @property
    def large(self) -> bool:
        """Whether the schedule is too large to be made as a whole."""
        return self.csv is None and math.prod(self.sizes.values()) > WHOLE

    def check(self) -> None:
        """Raise ConfigError for options that do not go together."""
        if self.recompute and (self.schedule == "all" or (self.schedule == "search" and self.memory_limit is None)):
            raise ConfigError(
                "--recompute has nothing to keep",
                found=f"--schedule {self.schedule}, without a limit of its own",
                expected="a schedule, or --schedule search with --memory-limit",
            )
        out = self.out
        if out is not None and (files.exists(out) or not files.is_folder(out.parent) or self.schedule == "all"):
            raise ConfigError(
                "no order can be written there",
                found=str(out),
                expected="a new file in a folder that exists, for one schedule",
            )
        whole = self.schedule == "search" or self.memory_limit is not None or self.recompute
        if self.large and (whole or out is not None):
            raise ConfigError(
                "a schedule of this size is never made as a whole",
                found=" x ".join(f"{count} {name}" for name, count in self.sizes.items()),
                expected=f"at most {WHOLE:,} forwards for search, --memory-limit, --recompute and --out",
            )

    def answer(self) -> Iterator[str]:
        """Yield the lines that are shown."""
        if self.large and self.schedule == "all":
            yield from self._all_repeated()
        elif self.large:
            yield from self._repeated()
        elif self.schedule == "all":
            sizes = self.sizes["ranks"], self.sizes["chunks"], self.sizes["microbatches"]
            yield from _table(*sizes, self.costs, self.memory_limit, self.network, self.message_bytes)
        else:
            made, costs = self._made()
            yield from _one(made, costs, self.memory_limit)
            if self.out is not None:
                yield _written(made, self.out)

    def _made(self) -> tuple[Schedule, Costs]:
        """Make the schedule; return it with its costs."""
        costs, limit = self.costs, self.memory_limit
        if self.network is not None:
            placement = _placement(self.schedule, self.csv, self.sizes["ranks"], self.sizes["chunks"])
            costs = replace(costs, transfer=self.network.times(placement, self.message_bytes))
        if self.schedule == "search":
            sizes = dict(self.sizes)
            ranks, microbatches = sizes.pop("ranks"), sizes.pop("microbatches")
            if self.recompute and limit is not None:
                made = schedules.search_with_recompute(
                    ranks, microbatches, costs, memory_limit=limit, **sizes, **self.search
                )
            else:
                made = schedules.search(ranks, microbatches, costs, memory_limit=limit, **sizes, **self.search)
            return made, costs
        if self.csv is not None:
            made = from_file(self.csv)
        else:
            own = None if self.recompute else limit
            made = schedules.by_name(str(self.schedule), **self.sizes, costs=costs, memory_limit=own)
        return schedules.with_recompute(made, costs, limit) if self.recompute else made, costs

    def _repetition(self, name: str) -> Repetition:
        return schedules.simulate_repeated(
            name, **self.sizes, costs=self.costs, links=self.network, message_bytes=self.message_bytes
        )

    def _all_repeated(self) -> Iterator[str]:
        """Yield a table of all schedules that are too large, the fastest first."""
        rows, without = [], []
        for name in names(self.sizes["chunks"]):
            try:
                found = self._repetition(name)
            except ArgumentError as error:
                without.append(f"{name}: {error.message}")
            else:
                numbers = f"{found.makespan:.6g}", f"{found.bubble_fraction:.4f}", str(found.peak_activations)
                rows.append((found.makespan, (name, *numbers)))
        yield from text_table(("schedule", "makespan", "bubble", "activations"), [row for _, row in sorted(rows)])
        yield from without

    def _repeated(self) -> Iterator[str]:
        """Yield the lines for a schedule that is too large."""
        found = self._repetition(str(self.schedule))
        ranks, microbatches = self.sizes["ranks"], self.sizes["microbatches"]
        stages = ranks * self.sizes["chunks"]
        yield f"schedule    {self.schedule}: {_sizes(ranks, stages, microbatches)}"
        yield f"makespan    {found.makespan:.6g}"
        yield f"bubble      {found.bubble_fraction:.4f} of all time, {found.bubble_ratio:.4f} of busy time"
        yield f"activations {found.peak_activations} on a rank, in chunks, at most"
        largest = "{}, {}".format(*map(counted, found.sizes[-1], ("rank", "micro-batch")))
        yield f"simulated   {len(found.sizes)} sizes to {largest}, and the rest repeats"


def _sizes(ranks: int, stages: int, microbatches: int) -> str:
    return f"{counted(ranks, 'rank')}, {counted(stages, 'stage')}, {counted(microbatches, 'micro-batch')}"


def _placement(schedule: str | None, csv: Path | None, ranks: int, chunks: int) -> tuple[int, ...]:
    """Say where stages lie, so that hops can have their times."""
    if csv is not None:
        return from_file(csv).placement
    if schedule == "search" and chunks > 1:
        raise ConfigError(
            "a search chooses where stages lie, and their hops are not known before",
            found=f"--transfer-model with --schedule search and {counted(chunks, 'chunk')}",
            remedy="give the time of each hop: --transfer",
        )
    return placement_of(str(schedule), ranks, chunks)


def _written(made: Schedule, path: Path) -> str:
    with files.writing("the order", path):
        path.write_text(made.to_csv(), encoding="utf-8")
    return f"order       {path}"


def _one(made: Schedule, costs: Costs, memory_limit: float | None) -> Iterator[str]:
    found = schedules.simulate(made, costs)
    held = max(found.peak_activations)
    limit = memory_limit if memory_limit is not None else held or None
    share, makespan, bound = schedules.gap(made, costs, limit)
    yield f"schedule    {made.name}: {_sizes(made.ranks, made.stages, made.microbatches)}"
    yield f"makespan    {makespan:.6g}"
    yield f"bubble      {found.bubble_fraction:.4f} of all time, {found.bubble_ratio:.4f} of busy time"
    yield f"activations {' '.join(map(str, found.peak_activations))} on each rank, in chunks, at most"
    if made.recomputed:
        room = " that runs as many forwards again"
    else:
        room = "" if limit is None else f" with {limit:g} {'activation' if limit == 1 else 'activations'} on each rank"
    yield f"bound       {bound:.6g}: no schedule of these stages is faster{room}"
    yield f"gap         {share:.2%}: it is at most so much slower than the best one"
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
