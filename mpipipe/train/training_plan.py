"""The plan of a training: layers of each rank, memory, and the fastest way; also on paper."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from mpipipe import arrays, planning, processor, schedules
from mpipipe.comm import Mesh, extents_of
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of, inprocess
from mpipipe.text import counted, exact_bytes, shown_bytes, shown_seconds
from mpipipe.train.config import PLANNED, TaskConfig, in_one_text, is_table
from mpipipe.train.shard import Shard
from mpipipe.train.task import Shape, Task
from mpipipe.train.task_calls import (
    call,
    chain,
    costs_of,
    example,
    layers_of,
    loss_of,
    make_optimizer,
    make_scaler,
    outline,
    place_of,
    shapes_of,
)


def pipe_of(config: TaskConfig, ranks: int) -> int:
    """Return the ranks of one pipeline, in a job of this size."""
    return config.pipe or max(1, ranks // config.seq)


def plan_layers(
    config: TaskConfig, task: Task, problem: planning.PlanningProblem
) -> planning.LayerPlan:
    """Plan a training on this mesh.

    Stages in which nothing is trained have no weight gradients in the schedule, and no backward if
    nothing before them is trained either. Raises ConfigError or ArgumentError if the configuration
    does not fit these numbers; for a schedule that nobody can mean before anything is built.
    """
    rows = problem.rows
    pipe = problem.ranks
    microbatches = config.microbatches or min(rows, schedules.PER_RANK * pipe)
    order = None
    if is_table(config.schedule):
        order = read_order(config, pipe)
        microbatches = order.microbatches
    if rows < microbatches:
        raise ConfigError(
            "fewer sequences than micro-batches",
            found=f"{counted(rows, 'sequence')} in each of {counted(problem.replicas, 'replica')}",
            expected=f"at least {microbatches}, the number of micro-batches",
            remedy="raise batch, or lower microbatches",
        )
    schedule = order or schedules.by_name(
        config.schedule,
        ranks=pipe,
        microbatches=microbatches,
        chunks=config.chunks,
        slices=config.slices,
    )
    if all(action.op == "F" for action in schedule.orders[0]):
        raise ConfigError("a schedule without backward passes cannot train", found=schedule.name)
    task.check_stages(schedule.stages)
    ranges = schedules.partition(problem.costs, schedule.stages)
    counts = config.partition
    if counts is not None:
        layers = len(problem.layers)
        if len(counts) != schedule.stages or sum(counts) != layers:
            raise ConfigError(
                "the partition does not fit",
                found=f"{counted(len(counts), 'stage')} with {counted(sum(counts), 'layer')} in "
                f"{in_one_text(counts)}",
                expected=f"{counted(schedule.stages, 'stage')} with {counted(layers, 'layer')}",
                remedy="count embedding, attention, feed-forward and head as a layer each, or "
                "leave partition out",
            )
        ranges = list(pairwise(accumulate(counts, initial=0)))
    schedule = planning.completed(schedule, ranges, problem.trained_layers, config.recompute_limit)
    return planning.LayerPlan(schedule, ranges, rows).with_names(problem.layers)


# -- Models and batches that do not fit into this machine are refused ------------------------------
#
# The limits are generous. What they let through may still be too much; what they refuse could not
# have run. Bytes are compared with all the memory of the machine, as if this rank had the machine
# for itself and kept nothing but what is counted here. Where the operating system does not say how
# much memory there is, nothing is refused.


def check_training(
    problem: planning.PlanningProblem,
    plan: planning.LayerPlan,
    rank: int,
    device: str,
    *,
    sample: int,
    message: int,
) -> None:
    """Raise ConfigError if a rank surely needs more memory than this machine has.

    On the host that is its parameters, gradients and state of the optimizer, the batch, and one
    micro-batch's input of each of its layers; for a GPU, parameters as they are drawn and the
    batch. `sample` are the bytes of inputs and targets of one sample, `message` those that a layer
    hands to the next for a micro-batch.
    """
    layers = plan.layers_of(rank)
    count = planning.parameters_of([problem.layers[layer] for layer in layers])
    trained = sum(problem.trained_counts[layer] for layer in layers)
    needs = {"batch": sample * plan.rows, f"{count:,} parameters": count * problem.wide}
    if device == "cpu":
        state = trained * problem.wide + problem.moment_bytes(trained)
        needs[f"gradients and state of {problem.optimizer}"] = state
        needs["activations of one micro-batch"] = len(layers) * message
    total = sum(needs.values())
    memory = processor.bytes_of_line("MemTotal")
    if memory is None or total <= memory:
        return
    listed = ", ".join(f"{shown_bytes(size)} for {name}" for name, size in needs.items())
    raise ConfigError(
        f"training on pipeline rank {rank} does not fit into memory",
        found=f"at least {exact_bytes(total)}: {listed}",
        expected=f"at most {exact_bytes(memory)}, all that {socket.gethostname()} has",
        remedy="lower dim, hidden, layers, batch or seq_len, or use more ranks for a pipeline",
    )


# -- A schedule that a configuration gives as a table of actions, not by its name ------------------
#
# Rank 0 reads the file once, and from then on the configuration has the table itself, and so has
# every checkpoint.


def read_order(config: TaskConfig, pipe: int) -> schedules.Schedule:
    """Read the table of a configuration, and prove it. ConfigError for one of other sizes."""
    schedule = schedules.from_csv(config.schedule)
    schedules.check(schedule)
    # The digits tell two tables apart.
    schedule = replace(schedule, name=f"order {schedule.fingerprint:016x}"[:14])
    sizes = {
        "pipe": (schedule.ranks, pipe),
        "chunks": (schedule.chunks, config.chunks),
        "microbatches": (schedule.microbatches, config.microbatches),
        "slices": (schedule.slices, config.slices),
    }
    for key, (size, expected) in sizes.items():
        if expected not in (None, size):
            raise ConfigError(
                f"the order of the schedule is not of {key} = {expected}",
                found=f"{key} = {size}, {schedule.batch}",
                expected=f"{key} = {expected}, as the configuration and the job say",
                remedy=f"give {key} = {size}, or make an order of these sizes with "
                "`mpipipe simulate`",
            )
    return schedule


def with_order(config: TaskConfig, comm: Communicator) -> TaskConfig:
    """Put the table of the file that a configuration names into it; collective."""
    if not schedules.is_path(config.schedule):
        return config
    table = group_of(comm).from_one(
        "train: the order of the schedule", lambda: schedules.from_file(config.schedule).to_csv()
    )
    return replace(config, schedule=table)


# -- The fastest way to train, measured on the ranks of a job --------------------------------------


def problem_of(
    config: TaskConfig, task: Task, pipe: int, replicas: int
) -> planning.PlanningProblem:
    """Return what is to be planned for this mesh; raises where the model or the batch cannot be."""
    if config.batch % replicas:
        raise ConfigError(
            "the batch does not divide among the replicas",
            found=f"batch {config.batch}, {counted(replicas, 'replica')}",
            expected=f"a multiple of {replicas}",
            remedy=f"for example batch = {(config.batch // replicas + 1) * replicas}",
        )
    fixed = {name: getattr(config, name) for name in config.fixed}
    if config.slices > 1:
        fixed["slices"] = config.slices
    moments = 2
    if config.optimizer == "sgd":
        moments = int(config.momentum > 0)
    return planning.PlanningProblem(
        layers=task.outline,
        costs=costs_of(task),
        trained=task.trained(),
        batch=config.batch,
        ranks=pipe,
        replicas=replicas,
        seq=config.seq,
        dtype=config.dtype,
        optimizer=config.optimizer,
        moments=moments,
        shards=replicas * config.seq if config.shard_optimizer else 1,
        fixed=fixed,
        memory_limit=config.memory_limit,
    )


def shard_of(config: TaskConfig, task: Task, comm: Communicator, sliced: bool = False) -> Shard:
    """Return this rank's share of samples, `sliced` as the configuration says or whole."""
    shard = task.shard(comm, config.seq)
    shard.dtype = arrays.dtype(config.dtype)
    shard.seed = config.seed
    if sliced and config.slices > 1:
        shard.cut = lambda length: call(task, "slice_lengths", length, config.slices)
    return shard


def make_shard(
    config: TaskConfig, task: Task, mesh: Mesh, on_paper: Shape | None = None, sliced: bool = True
) -> tuple[Shard, list[Any], planning.PlanningProblem]:
    """Return the share of samples, `sliced` or whole, the layers and the problem.

    The outline of the task is set. `on_paper` is the shape of a mesh that is not there, with more
    ranks than this one.
    """
    pipe, replicas, _ = on_paper or mesh.shape
    group = group_of(mesh.comm)
    with group.raise_together("train: the shards of sequences"):
        shard = shard_of(config, task, mesh.seq, sliced)
        task.pipe = pipe
    with group.raise_together("train: the layers"):
        layers = outline(task, shard)
        problem = problem_of(config, task, pipe, replicas)
    signatures = [(f"layer {place}", text) for place, text in enumerate(problem.signatures)]
    group.agree(
        "train: the layers",
        (("layers", len(layers)), *signatures),
        message=f"the ranks have different layers from {place_of(task, 'layers')}",
        remedy="make the list of layers of what is the same on all ranks; a layer may use "
        "shard.rank, not its shapes",
    )
    return shard, layers, problem


def measured_ranks(
    config: TaskConfig, task: Task, mesh: Mesh, on_paper: Shape | None = None
) -> planning.MeasuredRanks:
    """Return the ranks of a job, to measure a training on them; collective."""
    whole, _, problem = make_shard(config, task, mesh, on_paper, sliced=False)
    with group_of(mesh.comm).raise_together("plan: the inputs of the layers"):
        inputs: list[arrays.Tree] = []
        if not task.alike:
            inputs = [x for _, x, _ in chain(task, whole)]
    return planning.MeasuredRanks(
        problem=replace(problem, inputs=tuple(map(shapes_of, inputs))),
        mesh=mesh,
        layers=partial(layers_of, task, whole),
        loss_for=partial(loss_of, task, whole),
        example=partial(example, task, shard=whole, most=config.batch),
        optimizer=partial(make_optimizer, task, config),
        scaler=partial(make_scaler, config),
        lr=config.lr,
        clip=config.clip,
        seed=config.seed,
        frozen=task.freeze,
    )


def best_plan(config: TaskConfig, task: Task, mesh: Mesh, device: str) -> tuple[TaskConfig, str]:
    """Return the configuration with the best plan, and a line about it; collective."""
    report = planning.find_plan(measured_ranks(config, task, mesh), device)
    line = f"mpipipe: plan: {in_words(report.best)}"
    if report.oversubscribed:
        line += f" ({report.oversubscribed})"
    chosen = {name: getattr(report.best.choice, name) for name in PLANNED}
    return replace(config, plan="no", memory_limit=None, fixed=(), **chosen), line


def in_words(plan: planning.Plan) -> str:
    """Return a plan in one line."""
    choice = plan.choice
    again = ""
    if choice.recomputation != "-":
        again = f", forwards run again: {choice.recomputation}"
    return (
        f"{choice.schedule}, {counted(choice.chunks, 'chunk')}, "
        f"{counted(choice.microbatches, 'micro-batch')}, layers "
        f"{','.join(map(str, choice.partition))}{again}: {shown_seconds(plan.seconds)} a "
        f"step, bubble {plan.bubble:.1%}, {shown_bytes(plan.peak)} on a rank"
    )


# -- On paper: for ranks that are not there --------------------------------------------------------


@dataclass(frozen=True)
class MemoryEstimate:
    """What a training would be: its plan, and the memory of each rank of a pipeline."""

    config: TaskConfig
    task: Task
    problem: planning.PlanningProblem
    plan: planning.LayerPlan
    ranks: list[planning.RankBytes]


def estimate_task(
    make: Callable[[Communicator], tuple[TaskConfig, Task]], ranks: int
) -> MemoryEstimate:
    """Return what a training would be on `ranks` ranks, in one process; raises as that would.

    `make` returns configuration and task, for the communicator of one rank. One micro-batch runs on
    the processor, through each kind of layer.
    """

    def work(comm: Communicator) -> MemoryEstimate:
        config, task = make(comm)
        if config.plan == "auto":
            raise ConfigError(
                "a dry run cannot foresee what a plan chooses",
                found="plan auto",
                expected="no: a plan is made of measurements on the ranks of the training",
                remedy="make a plan with `mpipipe plan --out FILE`, and give that file to the dry "
                "run by --config",
            )
        task.find_data(group_of(comm))
        config = with_order(config, comm)
        pipe = pipe_of(config, ranks)
        replicas = extents_of(ranks, pipe, config.seq).data
        shape = pipe, replicas, config.seq
        with Mesh(comm) as mesh:
            # Raises where the layers attend in another way than slices can.
            sliced, _, _ = make_shard(config, task, mesh, shape)
            lengths = sliced.slice_lengths or [1] * config.slices
            shares = [length / sum(lengths) for length in lengths]
            measured = measured_ranks(config, task, mesh, shape)
            plan = plan_layers(config, task, measured.problem)
            of_ranks = planning.rank_bytes(
                measured, plan, recompute=config.recompute, copied=task.copies, shares=shares
            )
        return MemoryEstimate(config, task, measured.problem, plan, of_ranks)

    return inprocess.run(1, work)[0]
