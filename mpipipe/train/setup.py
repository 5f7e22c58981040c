"""From a task and a configuration to a trainer that runs: mesh, data, where to begin, stages,
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays, checkpoint, environment, files, nn, optim
from mpipipe.attention import kernels
from mpipipe.checkpoint import Checkpoint, check_replicas, released_at_end
from mpipipe.comm import Mesh, select_device
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, Preemption, RankGroup, group_of, inprocess, runtime, watching
from mpipipe.pipeline import Pipeline
from mpipipe.planning import LayerPlan, check_training
from mpipipe.train import metrics, output_folder, resume
from mpipipe.train.config import TaskConfig, read_keys
from mpipipe.train.progress import Progress
from mpipipe.train.rehearsal import rehearse
from mpipipe.train.report import NullReporter, Record, Reporter
from mpipipe.train.shard import Shard
from mpipipe.train.task import Task
from mpipipe.train.task_calls import Reader, call, layers_of
from mpipipe.train.task_file import TaskFileConfig, load_task
from mpipipe.train.task_loss import TaskLoss
from mpipipe.train.trainer import Tracing, Trainer, trace_folder
from mpipipe.train.training_plan import (
    best_plan,
    make_shard,
    pipe_of,
    plan_layers,
    problem_of,
    shard_of,
    with_order,
)


def check_same_config(group: RankGroup, config: TaskConfig) -> None:
    """Raise MismatchError on all ranks where they have different configurations."""
    group.agree(
        "train: the configuration",
        tuple((f"{key} =", repr(value)) for key, value in vars(config).items()),
        message="the ranks have different configurations",
        remedy="give the same file and flags to all ranks",
    )


def run(task: Task, config: TaskConfig, comm: Communicator | None = None) -> Record:
    """Train a task on all ranks of a communicator, and return its state at the end; collective.

    Raises what `train` does for text.

    Parameters
    ----------
    task : Task
        What is trained; an object of its own on every rank.
    config : TaskConfig
        The same on every rank. A relative path in it begins in the working folder of rank 0.
    comm : communicator, optional
        The ranks, COMM_WORLD by default. It is duplicated.
    """
    comm = runtime.resolve(comm)
    group = group_of(comm)
    check_same_config(group, config)
    if config.tensorboard:
        group.from_one("train: where metrics go", metrics.check_tensorboard)
    owned = output_folder.own(comm, config.out, task.folders)
    out = owned.folder
    pipe = pipe_of(config, comm.size)
    with released_at_end(owned, group):
        config = with_order(config, comm)
        trace = trace_folder(comm, config.trace, out, resumes=config.resume != "no")
        with watching(config.watchdog, out), Mesh(comm, pipe=pipe, seq=config.seq) as mesh:
            record = _train(mesh, task, config, out, trace)
        output_folder.finish(out, comm)
        return record


def _train(mesh: Mesh, task: Task, config: TaskConfig, out: Path, trace: Path | None) -> Record:
    device = select_device(config.device, mesh.comm)
    with ExitStack() as stack:
        stack.enter_context(arrays.own_stream(device))
        config, plan, shard, layers, chosen = _plan(mesh, task, config, device)
        start = resume.find_start(config, task, mesh, out)
        stages, loss = _stages(config, task, plan, mesh, layers, shard, device=device)
        del layers
        reader = Reader(task, shard, plan, mesh, config.steps)
        progress, norm = _begin(
            mesh, config, reader, plan, stages, start=start, loss=loss, stack=stack
        )
        if task.rehearses:
            check_replicas(mesh, stages)  # values that were drawn without the seed
            rehearse(reader, progress.pipeline, mesh, progress.step, loss)
        reporter = _open_output(mesh, task, config, plan, out, start, device)
        stack.enter_context(reporter)
        preemption = stack.enter_context(
            Preemption(
                mesh.comm,
                signals=config.preempt_signals,
                time_limit=config.time_limit,
                grace=config.preempt_grace,
                say=reporter.say,
            )
        )
        tracing = Tracing(trace, progress.pipeline, mesh, reporter.say)
        trainer = Trainer(
            config,
            progress,
            reader,
            plan,
            loss,
            norm,
            reporter,
            preemption=preemption,
            tracing=tracing,
            out=out,
        )
        preemption.whereabouts = trainer.whereabouts
        if chosen:
            reporter.say(chosen)
        stack.enter_context(trainer.checkpoints.saver)
        try:
            return trainer.run()
        except KeyboardInterrupt as error:  # for the report of the job's end
            error.args = error.args or (trainer.whereabouts(),)
            raise


def _plan(
    mesh: Mesh, task: Task, config: TaskConfig, device: str
) -> tuple[TaskConfig, LayerPlan, Shard, list[Any], str]:
    """Find the data, and plan the training. Return (config, plan, shard, layers, a line about a
    plan that was made).
    """
    task.find_data(group_of(mesh.comm))
    shard, layers = make_shard(config, task, mesh)
    chosen = ""
    if config.plan == "auto":
        config, chosen = best_plan(config, task, mesh, device, shard)
    plan = make_plan(config, task, mesh, device)
    task.open_data(plan, mesh)
    return config, plan, shard, layers, chosen


def _begin(
    mesh: Mesh,
    config: TaskConfig,
    reader: Reader,
    plan: LayerPlan,
    stages: list[nn.Stage],
    *,
    start: Checkpoint | None,
    loss: Callable[..., Any],
    stack: ExitStack,
) -> tuple[Progress, optim.GlobalNorm]:
    """Make pipeline, norm and optimizer, with the state of the checkpoint `start` or of a new
    training.
    """
    pipeline = stack.enter_context(
        Pipeline(
            stages, plan.schedule, mesh.pipe, loss, config.recompute, mesh.replicas,
            input_grads=False, slice_lengths=reader.shard.slice_lengths,
        )
    )  # fmt: skip
    norm = stack.enter_context(optim.GlobalNorm(stages, mesh.pipe, replicas=mesh.replicas))
    with group_of(mesh.comm).raise_together("train: the optimizer"):
        progress = Progress(config, pipeline, mesh, reader.task)
    if start is not None:
        progress.load(start)
    else:
        with progress.whole_parameters():
            resume.begin(config, reader.task, mesh, stages)
    return progress, norm


def _open_output(
    mesh: Mesh,
    task: Task,
    config: TaskConfig,
    plan: LayerPlan,
    out: Path,
    start: Checkpoint | None,
    device: str,
) -> Reporter | NullReporter:
    """Make the run folder, say in it where the numbers come from, and return the reporter of this
    rank.
    """
    output_folder.make_folder(out, mesh.comm, writes=mesh.replicas.rank == 0 or config.may_save)
    surroundings = environment.gather(mesh.comm, gpus=device != "cpu")
    with group_of(mesh.comm).raise_together("train: the reporter"):
        if surroundings is None:
            return NullReporter()
        step = 0 if start is None else start.step
        with output_folder.using(out):
            aside = resume.leave_behind(start, out)
            metrics.cut(out, step)
            reporter = Reporter(
                config.steps,
                out,
                unit=task.unit,
                oversubscribed=surroundings["oversubscribed"],
                done=None if config.resume == "no" else step,
                tensorboard=config.tensorboard,
            )
        for path in aside:
            reporter.say(
                f"mpipipe: a checkpoint after the one that is resumed is now called {path}"
            )
        keys = output_folder.resolved(config, task, plan, device, mesh.pipe.size)
        try:
            output_folder.write(out, keys, surroundings, task)
        except OSError as error:
            reporter.warn(
                f"mpipipe: {error.filename} cannot be written: {error.strerror}; the training "
                "goes on"
            )
        return reporter


def _stages(
    config: TaskConfig,
    task: Task,
    plan: LayerPlan,
    mesh: Mesh,
    layers: list[Any],
    shard: Shard,
    *,
    device: str,
) -> tuple[list[nn.Stage], Callable[..., Any]]:
    """Return the stages of this rank and the loss; collective."""
    with group_of(mesh.comm).raise_together("train: the stages"):
        kernels.check_choice(device)
        stages = plan.stages(mesh.pipe.rank, layers, config.dtype, config.seed, device, task.freeze)
        return stages, task.loss_for(stages[-1], plan.microbatch_rows, shard) or TaskLoss(
            task, config.slices > 1
        )


def load(run: str | Path, device: str = "cpu") -> tuple[Task, nn.Stage]:
    """Load a trained model from the run folder of a task in a file, to predict with; on each rank
    by itself.

    Parameters
    ----------
    run : str or Path
        The output folder of `mpipipe train FILE.py`, also where it was copied to.
    device : str
        Where the stage computes, as for `nn.Stage`.

    Returns
    -------
    task, stage : Task, nn.Stage
        The task of the copy of the file, with the attributes that `--set` gave it. The whole model
        in the dtype of the training, with the weights of its end or its newest checkpoint,
        whichever was written last.

    Raises
    ------
    ConfigError
        The folder is not that of a task in a file, or has no weights.
    ArgumentError
        The weights are damaged.
    """
    config = _config_of(run)

    def work(comm: Communicator) -> tuple[Task, nn.Stage]:
        task = load_task(str(config.task), config.set, comm)
        task.find_data(group_of(comm))
        layers = layers_of(task, shard_of(config, task, comm, 1), config.seed)
        stage = nn.Stage(layers, config.dtype, config.seed, device, frozen=tuple(task.freeze))
        with Mesh(comm) as mesh:
            checkpoint.load(resume.newest_state(Path(run)).path, mesh, [stage])
        return task, stage

    return inprocess.run(1, work)[0]


def _config_of(run: str | Path) -> TaskFileConfig:
    path = Path(run, output_folder.CONFIG)
    if not files.exists(path) or "task" not in read_keys(path):
        raise ConfigError(
            "the folder is not that of a task in a file",
            found=str(run),
            expected="the --out folder of `mpipipe train FILE.py`",
            remedy="for a task of a script: nn.Stage of its layers, and checkpoint.load of the "
            "folder weights",
        )
    return TaskFileConfig.load(str(path))


def export(run: Path, target: Path) -> str:
    """Write the weights that `load` takes into one file, named by `Task.state_name`; return what
    was done.
    """
    config = _config_of(run)
    task = inprocess.run(1, lambda comm: load_task(str(config.task), config.set, comm))[0]
    found = resume.newest_state(run)
    arrays_by_name: dict[str, checkpoint.Planned] = {}

    def values(name: str, entry: checkpoint.TensorEntry) -> np.ndarray:
        array = np.empty(entry.shape, entry.kind)
        checkpoint.read_arrays(found, {name: array})
        return array

    for name, entry in (
        pair for content in found.files.values() for pair in content.arrays.items()
    ):
        kind, _, own = name.partition("/")
        if kind == checkpoint.PARAMETERS:
            called = call(task, "state_name", own)
            if (
                not isinstance(called, str)
                or called in ("", "__metadata__", *arrays_by_name)
                or not called.isprintable()
            ):
                raise ConfigError(
                    f"{type(task).__name__}.state_name gives no name of its own to {own}",
                    found=repr(called),
                    expected="a text that no other parameter has, and not __metadata__",
                )
            arrays_by_name[called] = checkpoint.Planned(
                entry.kind, entry.shape, partial(values, name, entry)
            )
    files.check_new("the file of weights", target)
    with files.writing("the file of weights", target, remedy="make room, or choose another file"):
        checkpoint.write_tensors(target, dict(sorted(arrays_by_name.items())))
    return (
        f"wrote {len(arrays_by_name)} arrays of step {found.step} from {found.path} into {target}"
    )


def make_plan(config: TaskConfig, task: Task, mesh: Mesh, device: str) -> LayerPlan:
    """Plan the training, and check that it fits into memory and can be written; all ranks raise the
    same error.
    """
    with group_of(mesh.comm).raise_together("train: the plan"):
        plan = plan_layers(config, task, mesh.pipe.size, mesh.data.size)
        sample, message = task.sample_bytes(plan.microbatch_rows, config.dtype)
        problem = problem_of(config, task, mesh.pipe.size, mesh.data.size)
        check_training(problem, plan, mesh.pipe.rank, device, sample=sample, message=message)
        task.check(plan, mesh)
    return plan
