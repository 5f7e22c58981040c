"""mpipipe plan: measures a model on these ranks, and finds the fastest way to train it, with the
flags of train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from mpipipe import files
from mpipipe.cli.flags import parameters_of
from mpipipe.cli.output import on_ranks
from mpipipe.cli.train import FIELDS, Config, TaskFile, check_task_file, load_config, task_of
from mpipipe.comm import Mesh, select_device
from mpipipe.job import Communicator, group_of, runtime
from mpipipe.options import Option
from mpipipe.planning import Choice, PlanningProblem, PlanReport, find_plan, table
from mpipipe.train import (
    INSTEAD,
    PLANNED,
    SafeStream,
    TaskConfig,
    TaskFileConfig,
    measured_ranks,
    pipe_of,
    read_keys,
    toml_line,
)

NOT_WRITTEN = ("plan", "memory_limit", "fixed", "config")


def plan(
    config: Config = None,
    task: TaskFile = None,
    out: Annotated[
        str | None, Option("new file for the best plan, which train --config takes", metavar="FILE")
    ] = None,
    **flags: Any,
) -> int:
    """Find the fastest schedule, chunks, micro-batches, partition and recomputation for a training
    (mpiexec -n 4 ...).

    Takes the flags of train. What is given stays as it is; all else is chosen by measurements with
    all ranks at work.
    """
    check_task_file(task)

    def read() -> tuple[TaskConfig, dict[str, Any]]:
        """Return the configuration, and the keys that the user gave."""
        given = {**({} if config is None else read_keys(Path(config))), **flags}
        chosen = load_config(task, config, **{**flags, "plan": "auto"})
        return chosen, {
            **given,
            **({"task": chosen.task} if isinstance(chosen, TaskFileConfig) else {}),
        }

    def work() -> None:
        comm = runtime.world()
        with group_of(comm).raise_together("plan: reading the configuration"):
            chosen, given = read()
            if comm.rank == 0:
                check_output(out)
        found, problem = make_plans(chosen, comm)
        with group_of(comm).raise_together("plan: the result"):
            if comm.rank == 0:
                show(found)
                if out is not None:
                    write(
                        Path(out),
                        {**given, "pipe": problem.ranks, "seq": problem.seq},
                        found.choice,
                    )

    return on_ranks(work)()


def check_output(path: str | None) -> None:
    """Raise ConfigError where the file for the plan is not new."""
    if path is not None:
        files.check_new("the plan", Path(path))


def make_plans(config: TaskConfig, comm: Communicator) -> tuple[PlanReport, PlanningProblem]:
    """Return the plans of a training on these ranks, and what is planned; collective."""
    config, task = task_of(config, comm)
    with Mesh(comm, pipe=pipe_of(config, comm.size), seq=config.seq) as mesh:
        place = select_device(config.device, comm)
        task.find_data(group_of(comm))
        measured = measured_ranks(config, task, mesh)
        return find_plan(measured, place), measured.problem


def show(found: PlanReport) -> None:
    """Write the best plans to the standard output, and the lines of a job script for the ranks that
    were measured.
    """
    scale = found.profile.scale
    _say(
        *table(found.plans),
        f"real steps take {scale:.3f} of what measured layers and messages add up to; that is "
        "counted above",
        *([found.oversubscribed] if found.oversubscribed else []),
        "the lines of a script of SLURM, such as jobs/train.sbatch, for these ranks and threads:",
        f"#SBATCH --ntasks-per-node={found.ranks_per_node}",
        f"#SBATCH --cpus-per-task={found.threads}",
    )


def _say(*lines: str) -> None:
    SafeStream(sys.stdout).write("".join(f"{line}\n" for line in lines))


def write(path: Path, given: Mapping[str, Any], choice: Choice) -> None:
    """Write a configuration with the best plan, for `train --config`. Raises ConfigError if it
    cannot be.
    """
    keys = {
        name.rstrip("_"): value
        for name, value in given.items()
        if name not in (*NOT_WRITTEN, *PLANNED)
    }
    if "task" in keys:  # the file of a configuration names it from its own folder
        keys["task"] = os.path.relpath(keys["task"], path.parent)
    keys |= {name: getattr(choice, name) for name in ("schedule", "chunks", "microbatches")}
    keys["partition"] = ",".join(map(str, choice.partition))
    keys |= {"recompute": True} if choice.recompute else {}
    keys |= {} if choice.recompute_limit is None else {"recompute_limit": choice.recompute_limit}
    content = "".join(toml_line(*key) for key in keys.items())
    with files.writing("the plan", path):
        files.write_whole(path, content.encode(errors="surrogateescape"))  # a path may be no text
    _say(f"mpipipe: the plan is in {path}: python -m mpipipe train --config {path}")


plan.parameters = [  # type: ignore[attr-defined]
    *parameters_of(plan),
    *(entry for entry in FIELDS if entry.name not in ("out", "plan")),
]
plan.instead = INSTEAD  # type: ignore[attr-defined]
