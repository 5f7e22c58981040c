"""Runs parts of `bench gpu` one after the other: one that fails is named, and the others go on.

Each row is printed and written as soon as it is measured, so that a run that is ended loses none.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mpipipe import arrays
from mpipipe.cli.bench.gpu import attention, executor, gpt, memory, ring, transport
from mpipipe.cli.bench.gpu.rows import Row, show
from mpipipe.cli.versions import versions
from mpipipe.comm import launcher, runtime
from mpipipe.comm.device import select_device
from mpipipe.errors import ArgumentError, BackendError

ALONE = {"memory": memory, "attention": attention, "ring": ring, "executor": executor, "gpt": gpt}
TOGETHER = {"transport": transport}


def run(parts, repeats, path, peers, quick=False, comm=None):
    """Measure, print a line for each row and a table, and write JSON; exits with 1 where a part failed.

    Parameters
    ----------
    parts : names of parts; none means all that this number of ranks can run
    repeats : measured turns; None is each part's own number
    path : JSON file to write, or None
    peers : measure PyTorch as well, where it is installed
    quick : each part's smallest sizes
    comm : 1 or 2 ranks; None: COMM_WORLD

    Raises BackendError without a GPU, ArgumentError for a part that is unknown or needs another number of ranks.
    """
    comm = runtime.resolve(comm)
    chosen = _chosen(parts, comm.size)
    select_device("cuda", comm)
    rows: list[Row] = []
    failed: list[str] = []
    facts = {"gpus": arrays.describe_gpus(), "versions": versions(), "ranks": comm.size}
    facts |= {"mpi": not hasattr(comm, "store"), "quick": quick}

    def publish(line):
        if comm.rank == 0:
            print(line, flush=True)
            if path is not None:
                _write(Path(path), facts | {"rows": [row.facts() for row in rows], "failed": failed})

    for name, part in chosen.items():
        given = dict(getattr(part, "QUICK", {})) if quick else {}
        if repeats is not None:
            given["repeats"] = repeats
        if part in (attention, gpt):
            given["peers"] = peers
        if part in (executor, gpt, transport):
            given["comm"] = comm
        try:
            for row in part.measure(**given):
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
    """Why this process can have no MPI, and is no rank of a job that was launched as several; else None."""
    try:
        runtime.mpi()
    except BackendError as error:
        return None if launcher.launcher_size(os.environ) else str(error)
    return None


def _write(path, facts):
    """In one piece: a process that is killed leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(facts, indent=1) + "\n")
    part.replace(path)


def _chosen(names, ranks):
    fitting = ALONE if ranks == 1 else TOGETHER if ranks == 2 else {}
    if not fitting:
        raise ArgumentError("bench gpu", found=f"{ranks} ranks", expected="1 rank, or 2 for the transports")
    for name in names:
        if name not in fitting:
            needed = "1 rank" if name in ALONE else "2 ranks" if name in TOGETHER else ""
            raise ArgumentError(
                f"this part of bench gpu needs {needed}" if needed else "no part of bench gpu",
                found=f"{name} on {ranks} rank(s)",
                expected=", ".join(fitting),
            )
    return {name: fitting[name] for name in names} if names else fitting
