"""mpipipe plan: measures a model on these ranks, and finds the fastest way to train it, with the flags of train."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from mpipipe import files
from mpipipe.cli.flags import parameters_of
from mpipipe.cli.output import on_ranks, refusing
from mpipipe.cli.train import FIELDS, Config, TaskFile, check_task_file, load_config, task_of
from mpipipe.comm import Mesh, select_device
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, current_rank, group_of, inprocess, runtime
from mpipipe.options import Option
from mpipipe.planning import (
    Choice,
    PlanningProblem,
    PlanReport,
    SavedProfile,
    compare_placements,
    find_plan,
    shown_seconds,
    table,
)
from mpipipe.schedules import FORM, Links
from mpipipe.text import counted
from mpipipe.train import (
    INSTEAD,
    PLANNED,
    SafeStream,
    TaskConfig,
    TaskFileConfig,
    TrainConfig,
    measured_ranks,
    on_paper,
    pipe_of,
    plans_on_paper,
    read_keys,
    toml_line,
)

NOT_WRITTEN = ("plan", "memory_limit", "fixed", "config")


def plan(
    config: Config = None,
    task: TaskFile = None,
    out: Annotated[str | None, Option("new file for the best plan, which train --config takes", metavar="FILE")] = None,
    save_profile: Annotated[str | None, Option("new file for what was measured", metavar="FILE")] = None,
    profile: Annotated[str | None, Option("file of --save-profile: measure nothing", metavar="FILE")] = None,
    ranks: Annotated[int | None, Option("with --profile: ranks to plan for; default: one replica", least=1)] = None,
    transfer_model: Annotated[
        str | None, Option(f"with --profile: links between them, in s and bytes/s: {FORM}")
    ] = None,
    **flags: Any,
) -> int:
    """Find the fastest schedule, chunks, micro-batches, partition and recomputation for a training (mpiexec -n 4 ...).

    Takes the flags of train. What is given stays as it is; all else is chosen by measurements with all ranks at work.
    With --profile nothing is measured: one process plans for --ranks, without MPI.
    """
    check_task_file(task)

    def read() -> tuple[TaskConfig, dict[str, Any]]:
        """Return the configuration, and the keys that the user gave."""
        given = {**({} if config is None else read_keys(Path(config))), **flags}
        chosen = load_config(task, config, **{**flags, "plan": "auto"})
        return chosen, {**given, **({"task": chosen.task} if isinstance(chosen, TaskFileConfig) else {})}

    if profile is not None:
        with refusing("plan --profile"):
            if save_profile is not None:
                raise ConfigError("nothing is measured with --profile", found=f"--save-profile {save_profile}")
            check_outputs(out)
            _on_paper(*read(), Path(profile), ranks, transfer_model, out)
        return int(current_rank().unwritten)

    def work() -> None:
        comm = runtime.world()
        with group_of(comm).raise_together("plan: reading the configuration"):
            for name, value in (("--ranks", ranks), ("--transfer-model", transfer_model)):
                if value is not None:
                    raise ConfigError(
                        f"{name} is for plans on paper",
                        found=f"{name} {value}, without --profile",
                        expected="a plan is made of measurements, on the ranks that mpiexec or srun starts",
                        remedy="measure with --save-profile FILE on few ranks, then plan with --profile FILE for many; "
                        "`mpipipe simulate --schedule all --ranks N` compares schedules without any measurement",
                    )
            chosen, given = read()
            if comm.rank == 0:
                check_outputs(out, save_profile)
        found, problem, more = make_plans(chosen, comm)
        with group_of(comm).raise_together("plan: the result"):
            if comm.rank == 0:
                show(found, more)
                if out is not None:
                    write(Path(out), {**given, "pipe": problem.ranks, "seq": problem.seq}, found.choice)
                if save_profile is not None:
                    saved = SavedProfile.of(found.profile, problem.signatures, problem.facts, found.oversubscribed)
                    saved.save(Path(save_profile))
                    _say(f"mpipipe: the measurements are in {save_profile}: plan --profile, train --dry-run --profile")

    return on_ranks(work)()


def check_outputs(*paths: str | None) -> None:
    """Raise ConfigError where one of the files is not new, or two are the same."""
    given = [Path(path) for path in paths if path is not None]
    for path in given:
        files.check_new("the plan or profile", path)
    if len({path.resolve() for path in given}) < len(given):
        raise ConfigError(
            "the plan and the measurements cannot be one file",
            found=f"--out and --save-profile {given[0]}",
            expected="two new files",
        )


def _on_paper(
    config: TaskConfig, given: Mapping[str, Any], path: Path, ranks: int | None, model: str | None, out: str | None
) -> None:
    saved = SavedProfile.read(path)
    links = None if model is None else Links.read(model)
    count = (config.pipe or 1) * config.seq if ranks is None else ranks

    def work(comm: Communicator) -> PlanningProblem:
        chosen, task = task_of(config, comm)
        task.find_data(group_of(comm))
        return on_paper(chosen, task, count, comm)[1]

    problem = inprocess.run(1, work)[0]
    plans = plans_on_paper(problem, config, saved, links)
    rows = problem.rows // plans[0].choice.microbatches
    _say(
        *table(plans),
        f"on paper: {counted(count, 'rank')}, from measurements on a pipeline of {counted(saved.ranks, 'rank')}; "
        f"{path} says that real steps take {saved.scale:.3f} of what they add up to",
        *saved.doubts(problem.ranks, problem.replicas * problem.seq, rows, links is not None),
    )
    if out is not None:
        write(Path(out), {**given, "pipe": problem.ranks, "seq": config.seq}, plans[0].choice)


def make_plans(config: TaskConfig, comm: Communicator) -> tuple[PlanReport, PlanningProblem, list[str]]:
    """Return the plans of a training on these ranks, what is planned, and lines on ranks and threads; collective."""
    config, task = task_of(config, comm)
    with Mesh(comm, pipe=pipe_of(config, comm.size), seq=config.seq) as mesh:
        place = select_device(config.device, comm)
        task.find_data(group_of(comm))
        measured = measured_ranks(config, task, mesh)
        found = find_plan(measured, place)
        return found, measured.problem, compare_placements(measured, found, config.pipe)


def show(found: PlanReport, more: Sequence[str] = ()) -> None:
    """Write the best plans to the standard output, and more lines."""
    scale = found.profile.scale
    _say(
        *table(found.plans),
        f"real steps take {scale:.3f} of what measured layers and messages add up to; that is counted above",
        *(
            [f"reading the next batch meanwhile adds {shown_seconds(found.reading)}, counted, too"]
            if found.reading
            else []
        ),
        *([found.oversubscribed] if found.oversubscribed else []),
        *more,
    )


def _say(*lines: str) -> None:
    SafeStream(sys.stdout).write("".join(f"{line}\n" for line in lines))


def write(path: Path, given: Mapping[str, Any], choice: Choice) -> None:
    """Write a configuration with the best plan, for `train --config`. Raises ConfigError if it cannot be."""
    keys = {name.rstrip("_"): value for name, value in given.items() if name not in (*NOT_WRITTEN, *PLANNED)}
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
plan.other_names, plan.instead = TrainConfig.other_names, INSTEAD  # type: ignore[attr-defined]
