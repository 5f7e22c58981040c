"""From a task and a configuration to a trainer that runs: plan, stages, where to begin, output."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mpipipe import arrays, checkpoint, environment, files, nn
from mpipipe.comm import Mesh, select_device
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, Preemption, RankGroup, group_of, inprocess, runtime, watching
from mpipipe.train import output_folder, report
from mpipipe.train.config import TaskConfig, read_keys
from mpipipe.train.report import NullReporter, Record, Reporter
from mpipipe.train.task import Task
from mpipipe.train.task_calls import Reader, call, layers_of
from mpipipe.train.task_file import TaskFileConfig, load_task
from mpipipe.train.trainer import Trainer, trace_folder
from mpipipe.train.training_plan import (
    best_plan,
    check_training,
    make_shard,
    pipe_of,
    plan_layers,
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
        group.from_one("train: where metrics go", report.check_tensorboard)
    out = Path(output_folder.shared_path(comm, config.out))
    owner = checkpoint.take_folder(out, group, output_folder.using)
    owner.made = owner.made or config.out is None
    with checkpoint.released_at_end(owner, group):
        config = with_order(config, comm)
        made = Mesh(comm, pipe=pipe_of(config, comm.size), seq=config.seq, order=config.mesh_order)
        with watching(config.watchdog), made as mesh:
            record = _train(mesh, task, config, out)
        output_folder.finish(out, comm)
        return record


def _train(mesh: Mesh, task: Task, config: TaskConfig, out: Path) -> Record:
    device = select_device(config.device, mesh.comm)
    group = group_of(mesh.comm)
    trace = trace_folder(mesh.comm, config)
    with ExitStack() as stack:
        stack.enter_context(arrays.own_stream(device))
        task.find_data(group)
        shard, layers, problem = make_shard(config, task, mesh)
        chosen = ""
        if config.plan == "auto":
            config, chosen = best_plan(config, task, mesh, device)
        with group.raise_together("train: the plan"):
            plan = plan_layers(config, task, problem)
            sample, message = task.sample_bytes(plan.microbatch_rows, config.dtype)
            check_training(problem, plan, mesh.pipe.rank, device, sample=sample, message=message)
            task.check(plan, mesh)
        task.open_data(plan, mesh)
        start = output_folder.find_start(config, task, mesh, out)
        reader = Reader(task, shard, plan, mesh, config.steps)
        trainer = Trainer(stack, config, reader, device, layers, out, trace)
        trainer.begin(start)
        trainer.reporter = stack.enter_context(_reporter(trainer, device, start))
        trainer.preemption = stack.enter_context(
            Preemption(
                mesh.comm,
                signals=config.preempt_signals,
                time_limit=config.time_limit,
                grace=config.preempt_grace,
                say=trainer.reporter.say,
            )
        )
        trainer.preemption.whereabouts = trainer.whereabouts
        if chosen:
            trainer.reporter.say(chosen)
        stack.enter_context(trainer.saver)
        try:
            return trainer.run()
        except KeyboardInterrupt as error:
            # The report of the end of the job has it.
            error.args = error.args or (trainer.whereabouts(),)
            raise


def _reporter(trainer: Trainer, device: str, start: checkpoint.Checkpoint | None) -> Reporter:
    """Make the run folder, say in it where the numbers come from, and make the reporter."""
    config = trainer.config
    task = trainer.task
    mesh = trainer.mesh
    out = trainer.out
    output_folder.make_folder(out, mesh.comm)
    surroundings = environment.gather(mesh.comm, gpus=device != "cpu")
    with trainer.group.raise_together("train: the reporter"):
        if surroundings is None:
            return NullReporter()
        done = trainer.done
        with output_folder.using(out):
            report.cut(out, done)
            reporter = Reporter(
                config.steps,
                out,
                unit=task.unit,
                oversubscribed=surroundings["oversubscribed"],
                done=None if config.resume == "no" else done,
                tensorboard=config.tensorboard,
            )
            for path in output_folder.leave_behind(start, out):
                reporter.say(
                    f"mpipipe: a checkpoint after the one that is resumed is now called {path}"
                )
            chosen = {
                "device": device,
                "pipe": mesh.pipe.size,
                "microbatches": trainer.pipeline.schedule.microbatches,
            }
            keys = output_folder.resolved(config, task, chosen)
            output_folder.write(out, keys, surroundings, task)
        return reporter


def load(run: str | Path, device: str = "cpu") -> tuple[Task, nn.Stage]:
    """Load a trained model from the run folder of a task in a file; on each rank by itself.

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
        in the dtype of the training, with the weights of its end, or its newest checkpoint
        if that is of a later step.

    Raises
    ------
    ConfigError
        The folder is not that of a task in a file, or has no weights.
    ArgumentError
        The weights are damaged.
    """
    path = str(Path(run, output_folder.CONFIG))
    if not files.exists(path) or "task" not in read_keys(path):
        raise ConfigError(
            "the folder is not that of a task in a file",
            found=str(run),
            expected="the --out folder of `mpipipe train FILE.py`",
            remedy="for a task of a script: nn.Stage of its layers, and checkpoint.load of the "
            "folder weights",
        )
    config = replace(TaskFileConfig.load(path), seq=1)

    def work(comm: Communicator) -> tuple[Task, nn.Stage]:
        task = load_task(str(config.task), config.set, comm)
        task.find_data(group_of(comm))
        stage = nn.Stage(
            layers_of(task, shard_of(config, task, comm)),
            config.dtype,
            config.seed,
            device,
            frozen=tuple(task.freeze),
        )
        with Mesh(comm) as mesh:
            checkpoint.load(output_folder.newest_state(Path(run)).path, mesh, [stage])
        return task, stage

    return inprocess.run(1, work)[0]


def export(run: Path, target: Path) -> str:
    """Write the weights that `load` takes into one file, named by `Task.state_name`; say so."""
    task, stage = load(run)
    named: dict[str, arrays.Array] = {}
    for name, array in stage.contents.items():
        called = call(task, "state_name", name)
        is_name = isinstance(called, str) and called.isprintable()
        if not is_name or called in ("", "__metadata__", *named):
            raise ConfigError(
                f"{type(task).__name__}.state_name gives no name of its own to {name}",
                found=repr(called),
                expected="a text that no other parameter has, and not __metadata__",
            )
        named[called] = arrays.as_reals(array)
    files.check_new("the file of weights", target)
    with files.writing("the file of weights", target, remedy="make room, or choose another file"):
        checkpoint.write_tensors(target, dict(sorted(named.items())))
    saved = output_folder.newest_state(run)
    return f"wrote {len(named)} arrays of step {saved.step} from {saved.path} into {target}"
