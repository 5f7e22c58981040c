"""Runs parts of `bench gpu` one after the other. A part that fails is named, and the others go on.

Each row is printed and written as soon as it is measured, so a run that is ended early loses none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mpipipe import arrays, files
from mpipipe.bench.gpu import attention, executor, gpt, memory, products, ring, transport
from mpipipe.bench.gpu.rows import Row, show
from mpipipe.comm.mesh import select_device
from mpipipe.environment import versions
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.job import runtime, settings
from mpipipe.job.types import Communicator
from mpipipe.text import counted


class Part(Protocol):
    """A module of this folder that measures something."""

    @property
    def QUICK(self) -> dict[str, Any]:
        """Arguments of `measure` for the smallest sizes that tell something."""

    @property
    def measure(self) -> Callable[..., Iterator[Row | str]]:
        """Yields a row for each measurement, or why there is none; takes `repeats`."""


ALONE: dict[str, Part] = {
    "memory": memory,
    "products": products,
    "attention": attention,
    "ring": ring,
    "executor": executor,
    "gpt": gpt,
}
TOGETHER: dict[str, Part] = {"transport": transport}


def run(
    parts: Sequence[str],
    repeats: int | None,
    path: str | Path | None,
    peers: bool,
    quick: bool = False,
    comm: Communicator | None = None,
) -> NoReturn:
    """Measure, print a line for each row and a table, and write JSON; exits with 1 where a part failed.

    parts : names; an empty list means all parts that this number of ranks can run
    repeats : measured turns; None is each part's own number
    path : JSON file to write, or None
    peers : measure PyTorch as well, where it is installed
    quick : each part's smallest sizes
    comm : 1 or 2 ranks; None is COMM_WORLD

    Raises BackendError without a GPU, ArgumentError for a part that is unknown or needs another number of ranks.
    """
    with_mpi = comm is None
    comm = runtime.resolve(comm)
    chosen = _chosen(parts, comm.size)
    select_device("cuda", comm)
    rows: list[Row] = []
    failed: list[str] = []
    facts: dict[str, Any] = {"gpus": arrays.describe_gpus(), "versions": versions(), "ranks": comm.size}
    facts |= {"mpi": with_mpi, "quick": quick}

    def publish(line: Row | str) -> None:
        if comm.rank == 0:
            print(line, flush=True)
            if path is not None:
                content = facts | {"rows": [row.facts() for row in rows], "failed": failed}
                files.write_whole(Path(path), (json.dumps(content, indent=1) + "\n").encode())

    with arrays.own_stream():
        for name, part in chosen.items():
            arguments = dict(part.QUICK) if quick else {}
            if repeats is not None:
                arguments["repeats"] = repeats
            if part in (attention, gpt):
                arguments["peers"] = peers
            if part in (executor, gpt, transport):
                arguments["comm"] = comm
            try:
                for row in part.measure(**arguments):
                    if isinstance(row, str):
                        failed.append(f"{name}: {row}")
                        publish(failed[-1])
                    else:
                        rows.append(row)
                        publish(row)
            except Exception as error:
                if comm.size > 1:
                    raise  # the other ranks wait for this one
                failed.append(f"{name} failed: {type(error).__name__}: {error}")
                publish(failed[-1])
    if comm.rank == 0:
        show(f"bench gpu: {', '.join(arrays.describe_gpus())}", rows, failed)
    sys.exit(1 if failed else 0)


def without_mpi() -> str | None:
    """Return why this process has no MPI. None if it has, and where it is one of several ranks."""
    try:
        runtime.mpi()
    except BackendError as error:
        return None if settings.launcher_size(os.environ) else str(error)
    return None


def _chosen(names: Sequence[str], ranks: int) -> dict[str, Part]:
    fitting = ALONE if ranks == 1 else TOGETHER if ranks == 2 else {}
    if not fitting:
        raise ArgumentError("bench gpu", found=counted(ranks, "rank"), expected="1 rank, or 2 for the transports")
    for name in names:
        if name not in fitting:
            needed = "1 rank" if name in ALONE else "2 ranks" if name in TOGETHER else ""
            raise ArgumentError(
                f"this part of bench gpu needs {needed}" if needed else "no part of bench gpu",
                found=f"{name} on {ranks} rank(s)",
                expected=", ".join(fitting),
            )
    return {name: fitting[name] for name in names} if names else fitting
