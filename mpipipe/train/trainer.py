"""The training loop: batches through the pipeline, the optimizer, validation, and the report of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from mpipipe import checkpoint, optim, schedules
from mpipipe.checkpoint import check_owned
from mpipipe.comm import Mesh
from mpipipe.errors import NonFiniteError
from mpipipe.job import Preemption, agreed_by, group_of
from mpipipe.planning import LayerPlan
from mpipipe.text import counted
from mpipipe.train import resume
from mpipipe.train.config import TaskConfig
from mpipipe.train.options import ClusterOptions, RunOptions
from mpipipe.train.progress import Progress, StepBarrier
from mpipipe.train.report import NullReporter, Record, Reporter, summary
from mpipipe.train.resume import Checkpoints
from mpipipe.train.task import Task
from mpipipe.train.tracing import Tracing


class Trainer:
    """One training under way on this rank.

    `progress` has the pipeline and the optimizer, `preemption` says when the job has to leave, and `norm` over which
    stages and ranks gradients are clipped. `reporter` is a Reporter on rank 0, and a NullReporter elsewhere.
    """

    def __init__(
        self,
        config: TaskConfig,
        task: Task,
        mesh: Mesh,
        plan: LayerPlan,
        progress: Progress,
        preemption: Preemption,
        *,
        shard: Any,
        norm: optim.GlobalNorm,
        reporter: Reporter | NullReporter,
        out: Path,
        trace: Path | None = None,
    ) -> None:
        self.config, self.task, self.mesh, self.plan, self.progress = config, task, mesh, plan, progress
        self.preemption, self.norm, self.reporter, self.out = preemption, norm, reporter, out
        facts = resume.facts_of(config, task)
        self.checkpoints = Checkpoints(config, resume.checkpoints_of(out), progress, facts, reporter, preemption)
        for stage in progress.pipeline.stages:
            stage.optimizer_writes_compute()  # nobody but the optimizer changes parameters here
        self.batches = Batches(task, mesh, plan, shard)
        self.times = StepTimes(), StepTimes()  # since the last record, and in all
        self.step_barrier = StepBarrier(progress, group_of(mesh.comm), config.survive)
        self.tracing = Tracing(trace, progress.pipeline, mesh, reporter.say)

    def run(self) -> Record:
        """Train, validate, show a sample, and return the last record."""
        config, progress, task = self.config, self.progress, self.task
        if progress.step < config.steps and not progress.in_memory and self.preemption.asked():
            self.preemption.leave(self.whereabouts() if self.mesh.rank == 0 else "")
        place = "CPUs" if progress.pipeline.stages[0].device == "cpu" else "GPUs"
        self.reporter.say(introduction(config, task, self.plan, self.mesh, place=place, out=self.out))
        if progress.step:
            self.reporter.say(f"mpipipe: goes on behind step {progress.step}")
        elif task.beginning():
            self.reporter.say(f"mpipipe: begins with {task.beginning()}")
        if progress.reported < 0:
            validation = self.validate()
            self._report(Record(0, validation=validation, **task.metrics(None, validation)))
            progress.reported = 0
        elif progress.reported < progress.step:  # ranks have died meanwhile
            self._after_step()
        elif self.checkpoints.owed:
            self.checkpoints.follow(leaves=False)
        for step in range(progress.step, config.steps):
            progress.outcome = self.step(step)
            progress.step = step + 1
            self.tracing.end_step()
            self._after_step()
        return self._end()

    def _after_step(self) -> None:
        """Compare replicas, validate, report, save and leave, where the step or somebody else asks for it."""
        config, progress = self.config, self.progress
        done, (loss, lr, norm) = progress.step, progress.outcome
        progress.check_weights(config.check_weights)
        validated = done % config.eval_every == 0 or done == config.steps
        if validated or done == 1 or done % config.log_every == 0:
            validation = self.validate() if validated else None
            more = self.speed(self.times[0]) | progress.scaling() | self.task.metrics(loss, validation)
            self._report(Record(done, loss, validation, lr, norm, **more))
            self.times = StepTimes(), self.times[1]
        leaves = done < config.steps and self.preemption.due(self.checkpoints.saver.in_flight)
        self.checkpoints.follow(leaves)
        if leaves:
            self.tracing.finish()
            self.preemption.leave(self.whereabouts() if self.mesh.rank == 0 else "")
        progress.reported = done

    def _report(self, record: Record) -> None:
        with group_of(self.mesh.comm).raise_together("train: whether the folder is still this job's"):
            if self.mesh.rank == 0:
                check_owned(self.out)
        self.progress.record = record
        self.reporter.record(record)

    def _end(self) -> Record:
        """Leave the weights, a sample, and the last line."""
        task, pipeline = self.task, self.progress.pipeline
        self.tracing.finish()
        self.checkpoints.finish("the training ends without it")
        record = self.progress.record
        if record.validation is None:  # a training that was resumed at its end, which was no end before
            validation = self.validate()
            more = task.metrics(record.loss, validation)
            record = replace(record, step=self.progress.step, validation=validation, **more)
        task.save(self.out, self.plan, pipeline.stages, self.mesh)
        self.reporter.draw_losses()
        sample = task.sample(self.plan, pipeline, self.mesh, self.batches.shard)
        if sample:
            self.reporter.say(sample)
        if self.times[1].steps:
            record = replace(record, **self.speed(self.times[1]))
        self.reporter.say(f"mpipipe: ok steps={record.step}{summary(record)}{task.summary(record.facts())}")
        return record

    def whereabouts(self) -> str:
        """Return how far this training is, and how to go on with it, for a user who interrupts it."""
        return whereabouts(self.progress.step, self.config.steps, self.out)

    def step(self, step: int) -> tuple[float, float, float | None]:
        """Make one optimizer step, and return its loss, learning rate and gradient norm, the same on every rank.

        The norm is None if the step was skipped.
        """
        config, pipeline, start = self.config, self.progress.pipeline, perf_counter()
        self.step_barrier.begin(step)
        self.tracing.begin_step(config.steps - step)
        pending = pipeline.launch(*self.batches.training(step), scale=self.progress.scaler.scale)
        lr = optim.warmup_cosine(step, config.steps, config.lr, min(config.warmup, config.steps))
        with self.tracing.optimizer():
            norm = self._optimize(lr)
        loss = pending.wait().loss  # on its way since the backward ended: the norm has taken as long
        seconds = perf_counter() - start
        for times in self.times:
            times.add(seconds, pipeline.busy, pipeline.elapsed)
        self.reporter.advance()
        return loss, lr, norm

    def _optimize(self, lr: float) -> float | None:
        try:
            clip, scaler = self.config.clip, self.progress.scaler
            norm = optim.begin_step(self.step_barrier, clip, scaler=scaler, lr=lr, over=self.norm).wait()
        except NonFiniteError as error:  # the replicas have the same sums of gradients, so they raise it, too
            raise agreed_by(error, group_of(self.mesh.comm)) from None
        if norm is None:
            self.step_barrier.skip()
        return norm

    def validate(self) -> float:
        """Return the mean loss over the validation batches, always the same ones; on every rank."""
        count, pipeline = self.config.eval_batches, self.progress.pipeline
        return sum(pipeline.evaluate(*self.batches.validation(index)) for index in range(count)) / count

    def speed(self, times: StepTimes) -> dict[str, Any]:
        """Return tokens per second and the bubble of some steps, and the bubble that the stages' durations predict.

        Collective. Nothing is returned for no steps at all.
        """
        if times.steps == 0:
            return {}
        pipeline = self.progress.pipeline
        costs = pipeline.durations()
        everyone = group_of(self.mesh.comm).gather("train: the time of all ranks", times)
        busy, elapsed = sum(rank.busy for rank in everyone), sum(rank.elapsed for rank in everyone)
        units = times.steps * self.config.batch * self.task.units
        return {
            "tokens_per_second": units / max(rank.seconds for rank in everyone),
            "bubble": 1 - busy / elapsed,
            "predicted": schedules.simulate(pipeline.schedule, costs).bubble_fraction,
        }


@dataclass
class StepTimes:
    """Time that one rank spent in some steps: by the host's clock, and as the pipeline measured it."""

    steps: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    elapsed: float = 0.0

    def add(self, seconds: float, busy: float, elapsed: float) -> None:
        """Count one more step."""
        self.steps += 1
        self.seconds += seconds
        self.busy += busy
        self.elapsed += elapsed


Share: TypeAlias = "tuple[np.ndarray | None, np.ndarray | None]"  # inputs and targets, None if they do not belong


class Batches:
    """The batches of a training on this rank: the rows of its replica, where it has the first or the last stage."""

    def __init__(self, task: Task, mesh: Mesh, plan: LayerPlan, shard: Any) -> None:
        self.task, self.shard = task, shard
        placement = plan.schedule.placement
        self.first, self.last = mesh.pipe.rank == placement[0], mesh.pipe.rank == placement[-1]
        self.rows = range(mesh.data.rank * plan.rows, (mesh.data.rank + 1) * plan.rows)

    def training(self, step: int) -> Share:
        """Return inputs for the first stage and targets for the last, of a step."""
        return self._own(self.task.batch, step)

    def validation(self, index: int) -> Share:
        """Return the same of a batch of the validation, which has always the same ones."""
        return self._own(self.task.validation, index)

    def _own(self, draw: Any, number: int) -> Share:
        if not (self.first or self.last or self.task.everywhere):
            return None, None
        inputs, targets = draw(number, self.rows, self.shard)
        return inputs if self.first else None, targets if self.last else None


# -- How a training leaves before its end: what it catches, and what it says of how to go on --------------------------


def preemption_of(config: ClusterOptions, mesh: Mesh, reporter: Reporter | NullReporter) -> Preemption:
    """Return what says when the job has to leave, as configured; collective."""
    return Preemption(
        mesh.comm,
        signals=config.preempt_signals,
        time_limit=config.time_limit,
        grace=config.preempt_grace,
        say=reporter.say,
    )


def may_save(config: RunOptions) -> bool:
    """Whether this training may save a checkpoint: at steps that are configured, or where it has to leave."""
    limited = config.time_limit is None or config.time_limit > 0  # None: SLURM may set a limit
    return config.save_every > 0 or bool(config.preempt_signals) or limited


def whereabouts(done: int, steps: int, out: Path) -> str:
    """Return after which step the training is, and in a second line how to go on: with the folder it may be long."""
    saved, place = checkpoint.newest(resume.checkpoints_of(out)), f"after step {done} of {steps}"
    if saved is None and done == 0:
        return f"before step 1 of {steps}; there is nothing to save\n--resume auto --out {out} begins"
    if saved is None:
        return f"{place}; nothing is saved to go on from\nmetrics are in {out}"
    return f"{place}\n--resume auto --out {out} goes on from {saved.name}"


def introduction(config: TaskConfig, task: Task, plan: LayerPlan, mesh: Mesh, *, place: str, out: Path) -> str:
    """Return what is trained, on which ranks, and where metrics go; `place` is what computes: CPUs or GPUs."""
    schedule = plan.schedule
    return (
        f"mpipipe: {counted(mesh.comm.size, 'rank')} = "
        f"pipe {mesh.pipe.size} x data {mesh.data.size} x seq {mesh.seq.size}; "
        f"{schedule.name}, {counted(schedule.stages, 'stage')}, {counted(schedule.microbatches, 'micro-batch')}\n"
        f"mpipipe: {task.description(place)}\n"
        f"mpipipe: metrics in {out}"
    )
