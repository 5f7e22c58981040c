"""mpipipe plan: measures a model on these ranks, and finds the fastest way to train it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from mpipipe import files
from mpipipe.cli.flags import parameters_of
from mpipipe.cli.output import on_ranks
from mpipipe.cli.train import (
    FIELDS,
    Config,
    Nic,
    NicsPerNode,
    TaskFile,
    check_nics,
    check_task_file,
    launch_lines,
    load_config,
    task_of,
)
from mpipipe.comm import Mesh, select_device
from mpipipe.job import Communicator, group_of, runtime
from mpipipe.options import Option, Values
from mpipipe.planning import ORDERS, Choice, Plan, PlanningProblem, PlanReport, find_plan
from mpipipe.text import shown_bytes, shown_seconds, text_table
from mpipipe.train import (
    PLANNED,
    SafeStream,
    TaskConfig,
    TaskFileConfig,
    measured_ranks,
    pipe_of,
    read_keys,
    toml_line,
)

SHOWN = 10  # plans of a table
WIDEST = 32  # characters of a partition
NOT_WRITTEN = ("plan", "memory_limit", "fixed", "config")


def plan(
    config: Config = None,
    task: TaskFile = None,
    out: Annotated[
        str | None, Option("new file for the best plan, which train --config takes", metavar="FILE")
    ] = None,
    nics_per_node: NicsPerNode = None,
    nic: Nic = None,
    **flags: object,
) -> int:
    """Find the fastest schedule, cut and recomputation for a training.

    Takes the flags of train, such as mpiexec -n 4 python -m mpipipe plan --batch 64 --out FILE.
    Given options do not change; all others are chosen by measurements on all ranks.
    """
    check_task_file(task)

    def work() -> None:
        comm = runtime.world()
        with group_of(comm).raise_together("plan: reading the configuration"):
            keys = read_keys(config)
            keys.update(flags)
            chosen = load_config(task, config, **{**flags, "plan": "auto"})
            if isinstance(chosen, TaskFileConfig):
                keys["task"] = chosen.task
            check_nics(nics_per_node, nic)
            if comm.rank == 0 and out is not None:
                files.check_new("the plan", out)
        orders = ORDERS
        if keys.get("mesh_order") is not None:
            orders = {chosen.mesh_order: ORDERS[chosen.mesh_order]}
        report, problem = make_plans(chosen, comm, nics_per_node, nic, orders)
        with group_of(comm).raise_together("plan: the result"):
            if comm.rank == 0:
                show(report)
                if out is not None:
                    keys["pipe"] = problem.ranks
                    keys["seq"] = problem.seq
                    if report.best.order is not None:
                        keys["mesh_order"] = report.best.order
                    write(Path(out), keys, report.best.choice)

    return on_ranks(work)()


def make_plans(
    config: TaskConfig,
    comm: Communicator,
    nics_per_node: int | None = None,
    nic: str | None = None,
    orders: Iterable[str] = ORDERS,
) -> tuple[PlanReport, PlanningProblem]:
    """Return the plans of a training on these ranks, and what is planned; collective."""
    config, task = task_of(config, comm)
    pipe = pipe_of(config, comm.size)
    with Mesh(comm, pipe=pipe, seq=config.seq, order=config.mesh_order) as mesh:
        place = select_device(config.device, comm)
        task.find_data(group_of(comm))
        measured = measured_ranks(config, task, mesh)
        return find_plan(measured, place, nics_per_node, nic, orders), measured.problem


def show(report: PlanReport) -> None:
    """Write the best plans to the standard output."""
    lines = [
        *table(report.plans),
        f"real steps take {report.profile.scale:.3f} of what measured layers and messages add up "
        "to; that is counted above",
    ]
    if report.oversubscribed:
        lines.append(report.oversubscribed)
    if report.links is not None and report.best.order is not None:
        lines += launch_lines(report.best.order, report.links)
    _say(*lines)


def table(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the lines of a table of the best plans."""
    rows = [_row(plan, plans[0]) for plan in plans[:SHOWN]]
    yield from text_table([*rows[0]], [[*row.values()] for row in rows], left=(0, 3, 4))


def _row(plan: Plan, best: Plan) -> dict[str, str]:
    choice = plan.choice
    partition = ",".join(map(str, choice.partition))
    if len(partition) > WIDEST:
        partition = f"{partition[: WIDEST - 3]}..."
    return {
        "schedule": choice.schedule,
        "chunks": str(choice.chunks),
        "micro-batches": str(choice.microbatches),
        "layers of stages": partition,
        "run again": choice.recomputation,
        "step": shown_seconds(plan.seconds),
        "bubble": f"{plan.bubble:.1%}",
        "memory": shown_bytes(plan.peak),
        "slower": f"{plan.seconds / best.seconds - 1:.1%}",
    }


def _say(*lines: str) -> None:
    SafeStream(sys.stdout).write("".join(f"{line}\n" for line in lines))


def write(path: Path, keys: Values, choice: Choice) -> None:
    """Write a configuration with the best plan, for `train --config`. ConfigError if it cannot."""
    left_out = (*NOT_WRITTEN, *PLANNED)
    values = {}
    for name, value in keys.items():
        if name not in left_out:
            values[name.rstrip("_")] = value
    if "task" in values:
        # The file of a configuration names it from its own folder.
        values["task"] = os.path.relpath(values["task"], path.parent)
    for name in PLANNED:
        value = getattr(choice, name)
        if value:
            values[name] = value
    values["partition"] = ",".join(map(str, choice.partition))
    content = "".join(toml_line(*key) for key in values.items())
    with files.writing("the plan", path):
        # A path may be no text.
        files.write_whole(path, content.encode(errors="surrogateescape"))
    _say(f"mpipipe: the plan is in {path}: python -m mpipipe train --config {path}")


plan.parameters = [  # type: ignore[attr-defined]
    *parameters_of(plan),
    *(entry for entry in FIELDS if entry.name not in ("out", "plan")),
]
