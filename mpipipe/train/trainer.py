"""The training loop: batches through the pipeline, the optimizer, validation, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import checkpoint, optim, schedules
from mpipipe.checkpoint import check_owned
from mpipipe.comm import Mesh
from mpipipe.errors import MpipipeError, NonFiniteError
from mpipipe.job import Preemption, agreed_by, group_of
from mpipipe.planning import LayerPlan
from mpipipe.text import counted
from mpipipe.train import resume
from mpipipe.train.config import TaskConfig
from mpipipe.train.progress import Progress, StepBarrier
from mpipipe.train.report import NullReporter, Record, Reporter, summary
from mpipipe.train.resume import Checkpoints
from mpipipe.train.shard import Shard
from mpipipe.train.task import Task
from mpipipe.train.task_calls import Reader, call
from mpipipe.train.task_check import scores_of, shown, validate
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
        *,
        shard: Shard,
        reader: Reader,
        loss: Callable[..., Any],
        norm: optim.GlobalNorm,
        preemption: Preemption,
        reporter: Reporter | NullReporter,
        tracing: Tracing,
        out: Path,
    ) -> None:
        self.config, self.task, self.mesh, self.plan, self.progress = config, task, mesh, plan, progress
        self.reader, self.scores = reader, scores_of(task, loss)
        self.shard, self.norm, self.preemption, self.reporter = shard, norm, preemption, reporter
        self.tracing, self.out = tracing, out
        self.group = group_of(mesh.comm)
        facts = resume.facts_of(config, task)
        self.checkpoints = Checkpoints(config, resume.checkpoints_of(out), progress, facts, reporter, preemption)
        for stage in progress.pipeline.stages:
            stage.optimizer_writes_compute()  # nobody but the optimizer changes parameters here
        # steps, and seconds in them: by the host's clock, busy and elapsed as the pipeline measured; since the last
        # record, and in all
        self.times = np.zeros((2, 4))
        self.named: dict[str, float] = {}
        self.step_barrier = StepBarrier(progress, self.group, config.survive)

    def run(self) -> Record:
        """Train, validate, show a sample, and return the last record."""
        config, progress, task = self.config, self.progress, self.task
        if progress.step < config.steps and not progress.in_memory and self.preemption.asked():
            self._leave()
        place = "CPUs" if progress.pipeline.stages[0].device == "cpu" else "GPUs"
        self.reporter.say(introduction(config, task, self.plan, self.mesh, place=place, out=self.out))
        if progress.step:
            self.reporter.say(f"mpipipe: goes on after step {progress.step}")
        elif beginning := task.beginning() or resume.beginning(config):
            self.reporter.say(f"mpipipe: begins with {beginning}")
        if progress.reported < 0:
            validation = self.validate()
            more = task.derived(None, validation)
            self._report(Record(0, validation=validation, metrics=self.named, **more))
            progress.reported = 0
        elif progress.reported < progress.step:  # ranks have died meanwhile
            self._after_step()
        elif self.checkpoints.owed:
            self.checkpoints.follow(leaves=False)
        for step in range(progress.step, config.steps):
            try:
                progress.outcome = self.step(step)
                progress.step = step + 1
                self.tracing.end_step()
                self._after_step()
            except MpipipeError as error:
                error.message = f"step {step + 1} of {config.steps}: {error.message}"
                raise
        return self._end()

    def _after_step(self) -> None:
        """Compare replicas, validate, report, save and leave, where the step or somebody else asks for it."""
        config, progress = self.config, self.progress
        done, (loss, lr, norm) = progress.step, progress.outcome
        if config.check_weights and done % config.check_weights == 0:
            checkpoint.check_replicas(self.mesh, progress.pipeline.stages, progress.optimizer)
        validated = done % config.eval_every == 0 or done == config.steps
        if validated or done == 1 or done % config.log_every == 0:
            validation = self.validate() if validated else None
            more = self.speed(self.times[0]) | progress.scaling() | self.task.derived(loss, validation)
            self._report(Record(done, loss, validation, lr, norm, metrics=self.named if validated else {}, **more))
            self.times[0] = 0
        leaves = done < config.steps and self.preemption.due(self.checkpoints.saver.in_flight)
        self.checkpoints.follow(leaves)
        if leaves:
            self.tracing.finish()
            self._leave()
        progress.reported = done

    def _leave(self) -> None:
        self.preemption.leave(self.whereabouts() if self.mesh.rank == 0 else "")

    def _report(self, record: Record) -> None:
        with self.group.raise_together("train: whether the folder is still this job's"):
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
            more = task.derived(record.loss, validation)
            record = replace(record, step=self.progress.step, validation=validation, metrics=self.named, **more)
        task.save(self.out, self.plan, pipeline.stages, self.mesh, self.progress.step)
        self.reporter.draw_losses()
        sample = task.sample(self.plan, pipeline, self.mesh, self.shard)
        sample = sample or shown(task, self.plan, pipeline, self.mesh, self.shard)
        if sample:
            self.reporter.say(sample)
        record = replace(record, **self.speed(self.times[1]))
        self.reporter.say(f"mpipipe: ok steps={record.step}{summary(record, task.unit)}{task.summary(record.facts())}")
        return record

    def whereabouts(self) -> str:
        """Return after which step this is, and in a second line how to go on: with the folder it may be long."""
        done, steps, out = self.progress.step, self.config.steps, self.out
        saved, place = checkpoint.newest(resume.checkpoints_of(out)), f"after step {done} of {steps}"
        if saved is None and done == 0:
            return f"before step 1 of {steps}; there is nothing to save\n--resume auto --out {out} begins"
        if saved is None:
            return f"{place}; nothing is saved to go on from\nmetrics are in {out}"
        return f"{place}\n--resume auto --out {out} goes on from {saved.name}"

    def step(self, step: int) -> tuple[float, float, float | None]:
        """Make one optimizer step, and return its loss, learning rate and gradient norm, the same on every rank.

        The norm is None if the step was skipped.
        """
        config, pipeline, start = self.config, self.progress.pipeline, perf_counter()
        self.step_barrier.begin(step)
        self.tracing.begin_step(config.steps - step)
        with self.tracing.reading():
            batch = self.reader.batch(step)
        pending = pipeline.launch(*batch, scale=self.progress.scaler.scale)
        lr = float(call(self.task, "rate_at", step, config))
        with self.tracing.optimizer():
            norm = self._optimize(lr)
        loss = pending.wait().loss  # on its way since the backward ended: the norm has taken as long
        self.times += 1, perf_counter() - start, pipeline.busy, pipeline.elapsed + self.reader.waited
        self.reporter.advance()
        return loss, lr, norm

    def _optimize(self, lr: float) -> float | None:
        try:
            clip, scaler = self.config.clip, self.progress.scaler
            norm = optim.begin_step(self.step_barrier, clip, scaler=scaler, lr=lr, over=self.norm).wait()
        except NonFiniteError as error:  # the replicas have the same sums of gradients, so they raise it, too
            raise agreed_by(error, self.group) from None
        if norm is None:
            self.step_barrier.skip()
        return norm

    def validate(self) -> float:
        """Return the mean loss over the validation batches, always the same ones; on every rank.

        The means of the task's metrics are `named` then.
        """
        pipeline, batches = self.progress.pipeline, self.config.eval_batches
        loss, self.named = validate(pipeline, self.reader, self.scores, batches, self.group)
        return loss

    def speed(self, times: np.ndarray) -> dict[str, Any]:
        """Return tokens per second and the bubble of some steps, and the bubble that the stages' durations predict.

        Collective. Nothing is returned for no steps at all.
        """
        if times[0] == 0:
            return {}
        pipeline = self.progress.pipeline
        costs = pipeline.durations()
        steps, seconds, busy, elapsed = zip(*self.group.gather("train: the time of all ranks", times.tolist()))
        return {
            self.task.per_second: steps[0] * self.config.batch * self.task.units / max(seconds),
            "bubble": 1 - sum(busy) / sum(elapsed),
            "predicted": schedules.simulate(pipeline.schedule, costs).bubble_fraction,
        }


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
