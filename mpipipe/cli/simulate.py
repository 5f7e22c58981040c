"""mpipipe simulate: a schedule on paper, and how far it is from the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, TypeVar

from mpipipe.cli.flags import Flag
from mpipipe.cli.number_list import one_or_more
from mpipipe.cli.one_process import check_one_process
from mpipipe.cli.refusal import refusing
from mpipipe.cli.simulation import Request
from mpipipe.cli.stdout import show
from mpipipe.errors import ConfigError
from mpipipe.schedules import Costs, Links
from mpipipe.schedules.csv_text import is_path
from mpipipe.schedules.links import FORM

Number = TypeVar("Number", int, float)
Cost = Annotated[str, Flag("time in each stage: a number, or one for each stage with commas between")]


def simulate(
    schedule: Annotated[str | None, Flag("a name; all: a table of them; search: look for the best; FILE.csv")] = None,
    ranks: Annotated[int | None, Flag("P; default: 4")] = None,
    chunks: Annotated[int | None, Flag("V, stages on each rank; default: 1")] = None,
    microbatches: Annotated[int | None, Flag("M; default: 16")] = None,
    forward: Cost = "1",
    input_grad: Cost = "1",
    weight_grad: Cost = "1",
    transfer: Annotated[str, Flag("time of a message between stages: a number, or one for each stage")] = "0",
    transfer_model: Annotated[str | None, Flag(f"in place of --transfer, in s and bytes/s: {FORM}")] = None,
    message_bytes: Annotated[float, Flag("of one micro-batch between two stages, for --transfer-model")] = 0,
    memory_limit: Annotated[float | None, Flag("chunk activations that a rank may hold at once")] = None,
    seconds: Annotated[float | None, Flag("of --schedule search; default: 10")] = None,
    seed: Annotated[int | None, Flag("of --schedule search; default: 0")] = None,
    recompute: Annotated[bool, Flag("run forwards again, as many as --memory-limit needs; without it, all")] = False,
    csv: Annotated[Path | None, Flag("read the order from this file, which may have any name")] = None,
    out: Annotated[Path | None, Flag("write the order to this new file")] = None,
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
        asked = Request(
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
