"""The plan and the memory of a training: what is to be planned, on ranks that are measured or on paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.planning import (
    Choice,
    LayerPlan,
    MeasuredRanks,
    Plan,
    PlanningProblem,
    Prediction,
    Profile,
    RankBytes,
    SavedProfile,
    StageMeter,
    declared,
    find_plan,
    find_plans,
    in_words,
    predict,
    profile_of,
    rank_bytes,
)
from mpipipe.schedules import Links
from mpipipe.text import counted
from mpipipe.train.config import TaskConfig
from mpipipe.train.options import PLANNED, ParallelOptions, is_table
from mpipipe.train.progress import make_optimizer, make_scaler
from mpipipe.train.task import Task
from mpipipe.train.training_plan import pipe_of, plan_layers, rows_of, with_order


def problem_of(config: TaskConfig, task: Task, pipe: int, replicas: int) -> PlanningProblem:
    """Return what is to be planned for this mesh; raises where the model or the batch cannot be."""
    rows_of(config, replicas)
    fixed: dict[str, Any] = {name: getattr(config, name) for name in config.fixed}
    names = ("dtype", "seq", "layout", "optimizer")
    return PlanningProblem(
        layers=task.layers(None),
        costs=task.costs(),
        trained=task.trained(),
        batch=config.batch,
        ranks=pipe,
        replicas=replicas,
        seq=config.seq,
        dtype=config.dtype,
        optimizer=config.optimizer,
        moments=2 if config.optimizer == "adamw" else int(config.momentum > 0),
        fixed={name: value for name, value in fixed.items() if value is not None or name == "recompute_limit"},
        memory_limit=config.memory_limit,
        facts={**task.planning_facts(), **{name: getattr(config, name) for name in names}},
    )


def measured_ranks(config: TaskConfig, task: Task, mesh: Mesh) -> MeasuredRanks:
    """Return the ranks of a job as those to measure a training on; collective. Raises the same error on every rank."""
    with group_of(mesh.comm).raise_together("plan: the shards of sequences"):
        shard = task.shard(mesh.seq, 1)
    return MeasuredRanks(
        problem=problem_of(config, task, mesh.pipe.size, mesh.data.size),
        mesh=mesh,
        layers=lambda: task.layers(shard),
        loss_for=lambda stage, rows: task.loss_for(stage, rows, shard),
        example=lambda rows, microbatches: task.example(rows, microbatches, shard),
        message_shape=lambda rows: task.message_shape(rows, shard),
        optimizer=lambda pipeline: make_optimizer(config, pipeline),
        scaler=lambda: make_scaler(config),
        lr=config.lr,
        clip=config.clip,
        seed=config.seed,
        frozen=task.freeze,
    )


def planned(config: TaskConfig, choice: Choice) -> TaskConfig:
    """Return the configuration with this choice, which leaves nothing to plan."""
    chosen = {name: getattr(choice, name) for name in PLANNED}
    return replace(config, plan="no", memory_limit=None, fixed=(), **chosen)


def best_plan(config: TaskConfig, task: Task, mesh: Mesh, device: str) -> tuple[TaskConfig, str]:
    """Return the configuration with the best plan, and in a line what it is; collective over all ranks."""
    report = find_plan(measured_ranks(config, task, mesh), device)
    rough = f" ({report.oversubscribed})" if report.oversubscribed else ""
    line = f"mpipipe: plan: {in_words(report.plans[0])}{rough}" if report.plans else ""
    return planned(config, report.choice), line


# -- On paper: for ranks that are not there ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryEstimate:
    """What a training would be: its plan, the shape of the mesh, and the memory of each rank of a pipeline."""

    config: TaskConfig
    task: Task
    problem: PlanningProblem
    plan: LayerPlan
    ranks: list[RankBytes]

    @property
    def parameters(self) -> int:
        """Number of parameters, each tied one once."""
        sizes = {entry.tie or name: entry.size for name, entry in declared(self.problem.layers).items()}
        return sum(sizes.values())

    @property
    def count(self) -> int:
        """Number of all ranks."""
        return self.problem.ranks * self.problem.replicas * self.problem.seq


def mesh_of(config: ParallelOptions, ranks: int) -> tuple[int, int]:
    """Return the ranks of a pipeline, and the number of replicas."""
    pipe = pipe_of(config, ranks)
    replicas, rest = divmod(ranks, pipe * config.seq)
    if rest or not replicas:
        raise ConfigError(
            "the mesh does not fit the ranks",
            found=f"{counted(ranks, 'rank')}, pipe {pipe}, seq {config.seq}",
            expected=f"a multiple of {pipe * config.seq}",
        )
    return pipe, replicas


def estimate_memory(config: TaskConfig, task: Task, ranks: int, comm: Communicator, process: int) -> MemoryEstimate:
    """Estimate the memory of a training on `ranks` ranks, in one process, which is `comm`; raises as that would.

    `process` are the bytes of this process without the training. One micro-batch runs on the processor, on stages with
    at most two repetitions of the layers that repeat.
    """
    if config.plan == "auto":
        raise ConfigError(
            "a dry run cannot foresee what a plan chooses",
            found="plan auto",
            expected="no: a plan is made of measurements on the ranks of the training",
            remedy="make a plan with `mpipipe plan --out FILE`, and give that file to the dry run by --config",
        )
    config = with_order(config, comm, Path(config.out or "."))
    pipe, replicas = mesh_of(config, ranks)
    plan = plan_layers(config, task, pipe, replicas)
    problem = problem_of(config, task, pipe, replicas)
    shard, rows = task.shard(comm, plan.schedule.microbatches), plan.microbatch_rows
    meter = StageMeter(
        lambda: task.layers(shard), config.dtype, task.freeze, lambda stage: task.loss_for(stage, rows, shard)
    )
    example = task.example(rows, 1, shard)
    found = rank_bytes(problem, plan, meter, example, recompute=config.recompute, copied=task.copies, process=process)
    return MemoryEstimate(config, task, problem, plan, found)


def plans_on_paper(
    problem: PlanningProblem, config: ParallelOptions, saved: SavedProfile, links: Links | None
) -> list[Plan]:
    """Find the plans of a training on ranks that are not there, the fastest first.

    Raises ConfigError where the profile is of another training, or no plan can be.
    """
    _check_cpu(config)
    profile: Profile = profile_of(problem, saved, problem.space.sizes, links)
    return find_plans(profile, problem.space, problem.memory_limit)


def predicted(estimate: MemoryEstimate, saved: SavedProfile) -> Prediction:
    """Predict the steps of a training whose memory was estimated."""
    config, plan, problem = estimate.config, estimate.plan, estimate.problem
    if is_table(config.schedule):
        raise ConfigError(
            "a profile does not predict an order from a file",
            found=plan.schedule.name,
            expected="a schedule by its name",
            remedy="leave out --profile, or compare with `mpipipe simulate --csv FILE`",
        )
    counts = tuple(stop - start for start, stop in plan.layer_ranges)
    choice = Choice(
        config.schedule, config.chunks, plan.schedule.microbatches, counts, config.recompute, config.recompute_limit
    )
    _check_cpu(config)
    profile = profile_of(problem, saved, [plan.microbatch_rows])
    return predict(profile, choice, problem.rows, problem.trained_layers)


def _check_cpu(config: ParallelOptions) -> None:
    if config.device == "cuda":
        raise ConfigError("a profile is of the CPU", found="device cuda", expected="cpu: GPUs are not measured")
