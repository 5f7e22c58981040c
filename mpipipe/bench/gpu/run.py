"""Runs parts of `bench gpu` one after the other. A part that fails is named, and the others go on.

Each row is printed and written as soon as it is measured, so a run that is ended early loses none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from mpipipe import arrays, files, processor
from mpipipe.bench.gpu import kernels, steps
from mpipipe.bench.timing import Row
from mpipipe.cli import refusing
from mpipipe.comm import select_device
from mpipipe.environment import versions
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, inprocess
from mpipipe.options import Option


class GpuPart(NamedTuple):
    """A part: a function that yields rows, and its arguments for `--quick`."""

    measure: Callable[..., Iterator[Row | str]]
    quick: Mapping[str, Any]


PARTS = {
    "memory": GpuPart(
        kernels.measure_memory, dict(repeats=5, rows=8192, vocab=50304, parameters=1 << 24)
    ),
    "attention": GpuPart(kernels.measure_attention, dict(repeats=5, lengths=(8192,))),
    "executor": GpuPart(steps.measure_executor, dict(repeats=3, microbatches=8)),
    "gpt": GpuPart(steps.measure_step, dict(repeats=3)),
}


def gpu(
    repeats: Annotated[
        int | None, Option("measured turns; default: each part's own number", least=1)
    ] = None,
    part: Annotated[
        list[str] | None, Option("memory, attention, executor, gpt; repeatable; default: all")
    ] = None,
    json: Annotated[Path | None, Option("file to write the numbers to")] = None,
    peers: Annotated[bool, Option("also measure PyTorch, if it is installed")] = True,
    quick: Annotated[bool, Option("smallest meaningful sizes")] = False,
) -> int:
    """Kernels, executor and a GPT's step on a GPU, on one rank (python -m mpipipe bench gpu)."""
    processor.prepare_process()
    with refusing("bench gpu"):
        measure = partial(run, part or [], repeats, json, peers, quick)
        return inprocess.run(1, measure)[0]


def run(
    parts: Sequence[str],
    repeats: int | None,
    path: Path | None,
    peers: bool,
    quick: bool,
    comm: Communicator,
) -> int:
    """Measure, print a line for each row, and write JSON; return 1 if a part failed, else 0.

    No `parts` are all of them. `comm` has one rank.
    """
    for name in parts:
        if name not in PARTS:
            raise ArgumentError("no part of bench gpu", found=name, expected=", ".join(PARTS))
    select_device("cuda", comm)
    rows: list[Row] = []
    failed: list[str] = []
    facts: dict[str, object] = {
        "gpus": arrays.describe_gpus(),
        "versions": versions(),
        "quick": quick,
    }

    def publish(line: Row | str) -> None:
        if isinstance(line, Row):
            rows.append(line)
        else:
            failed.append(line)
        print(line, flush=True)
        if path is not None:
            content = facts | {"rows": [row.facts() for row in rows], "failed": failed}
            files.write_whole(path, (dumps(content, indent=1) + "\n").encode())

    with arrays.own_stream():
        for name in parts or PARTS:
            part = PARTS[name]
            arguments: dict[str, Any] = {}
            if quick:
                arguments |= part.quick
            if repeats is not None:
                arguments["repeats"] = repeats
            for key, value in (("peers", peers), ("comm", comm)):
                if key in signature(part.measure).parameters:
                    arguments[key] = value
            try:
                for row in part.measure(**arguments):
                    if isinstance(row, str):
                        row = f"{name}: {row}"
                    publish(row)
            except Exception as error:
                publish(f"{name} failed: {type(error).__name__}: {error}")
    return min(1, len(failed))
