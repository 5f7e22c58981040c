"""`bench dry-run`: the memory that `train --dry-run` foresees against what a training takes, rank by rank.

Measured is how far the resident memory of a process grows from the first line of `train` to its peak. Such a training
must be the first thing that a process does: what an earlier one has left behind is taken again.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from mpipipe.cli.output import show
from mpipipe.errors import BackendError
from mpipipe.job import runtime
from mpipipe.job.group import group_of
from mpipipe.language.models import GPT
from mpipipe.language.task import estimate
from mpipipe.planning.memory import resident
from mpipipe.train import TrainConfig, train

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STEPS = 2
MIB = 2**20


def run(config: TrainConfig) -> None:
    """Train two steps, and print for each rank the bytes foreseen, those measured, and their ratio."""
    comm = runtime.world()
    group = group_of(comm)
    folder = group.broadcast("bench: a folder", tempfile.mkdtemp() if comm.rank == 0 else None)
    try:
        with group.raise_together("bench: the peak of resident memory"):
            begin_peak()
        before = resident()
        train(replace(config, steps=STEPS, out=str(Path(folder, "run"))), GPT, comm)
        grown = group.gather("bench: the peaks", peak() - before)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if comm.rank == 0:
        before = resident()
        found = estimate(config, GPT, comm.size)
        for rank, measured in enumerate(grown):
            pipe_rank = rank // (found.problem.replicas * found.problem.seq)
            foreseen = found.ranks[pipe_rank].total - before
            show(
                f"dry run, rank {rank}: foreseen {foreseen / MIB:.1f} MiB, measured {measured / MIB:.1f} MiB, "
                f"ratio {foreseen / measured:.3f} (within 0.9 ... 1.1)\n"
            )
    group.agree("bench: the end")


def begin_peak() -> None:
    """Let the peak of resident memory begin anew. Raises BackendError if the system has no such thing."""
    try:
        RESET.write_text("5")
    except OSError as error:
        raise BackendError(f"the peak of memory cannot be measured here ({error})", remedy="run it on Linux") from None


def peak() -> int:
    """Return the most bytes that were resident since."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
