"""The training loop: batches through the pipeline, the optimizer, validation, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from mpipipe import arrays, checkpoint, nn, optim, schedules
from mpipipe.attention import kernels
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError
from mpipipe.job import Communicator, Preemption, agreed_by, group_of
from mpipipe.options import Values
from mpipipe.pipeline import Pipeline, StepResult
from mpipipe.text import counted
from mpipipe.tracing import Recording, check_new
from mpipipe.train import output_folder
from mpipipe.train.config import TaskConfig
from mpipipe.train.rehearsal import rehearse, seq_warning
from mpipipe.train.report import Record, Reporter, finite, summary
from mpipipe.train.task import Task
from mpipipe.train.task_calls import (
    Reader,
    TaskLoss,
    call,
    checked_rate,
    loss_of,
    make_optimizer,
    make_scaler,
    read,
)


class Trainer:
    """One training under way on this rank: its state, and the loop.

    Stages, pipeline and norm are made on the `stack`, and `layers` are taken out of their list. Set
    before `run`: `reporter`, a NullReporter but on rank 0, and `preemption`, which says when the
    job has to leave.

    Batches follow from (seed, step), dropout masks from (seed, steps of the pipeline), and the
    sample from the seed. So these numbers are the position in the data and the state of all random
    numbers.
    """

    reporter: Reporter
    preemption: Preemption
    # Steps recorded so far, where a trace is wanted.
    recording: Recording | None = None
    # Number of steps made.
    done = 0
    # Of the last step, whose loss and norm may still be on a GPU.
    result: StepResult
    lr: float
    # None if the optimizer has left the step out.
    norm_of_step: float | optim.NormOfStep | None

    def __init__(
        self,
        stack: ExitStack,
        config: TaskConfig,
        reader: Reader,
        device: str,
        layers: list[object],
        out: Path,
        trace: Path | None,
    ) -> None:
        self.config = config
        self.reader = reader
        self.task = task = reader.task
        self.mesh = mesh = reader.mesh
        self.group = group_of(mesh.comm)
        self.pipe = mesh.pipe
        self.out = out
        # Where a trace of some steps will be written.
        self.trace = trace
        plan = reader.plan
        with self.group.raise_together("train: the stages"):
            kernels.check_choice(device)
            stages = plan.stages(
                mesh.pipe.rank, layers, config.dtype, config.seed, device, task.freeze
            )
            # They may hold whole models.
            layers.clear()
            self.loss = loss_of(task, reader.shard, stages[-1], plan.microbatch_rows)
        self.stages = stages
        self.pipeline = stack.enter_context(
            Pipeline(
                stages,
                plan.schedule,
                mesh.pipe,
                self.loss,
                config.recompute,
                mesh.replicas,
                input_grads=False,
                slice_lengths=reader.shard.slice_lengths,
            )
        )
        with self.group.raise_together("train: the optimizer"):
            self.optimizer = make_optimizer(task, config, stages, mesh)
        # In its context the parameters of the stages can be read and set; an optimizer of a task
        # need not have it.
        self.whole_parameters = getattr(self.optimizer, "whole_parameters", nullcontext)
        self.scaler = make_scaler(config)
        # Its end finishes what is in flight.
        self.saver = checkpoint.Saver(
            out / output_folder.CHECKPOINTS, mesh, stages, self.optimizer, keep=config.keep
        )
        self.record = Record(0)
        # Steps, seconds in them by the host's clock, and seconds of waiting for batches.
        self.spent = np.zeros(3)
        # What `_times` were at the last record.
        self.recorded = np.zeros(4)

    def begin(self, start: checkpoint.Checkpoint | None) -> None:
        """Take the state of a checkpoint or a new one, and rehearse the first batches."""
        stages = self.stages
        if start is not None:
            state = start.state
            checkpoint.load(start.path, self.mesh, stages, self.optimizer)
            self.done = start.step
            self.record = Record.of(state["record"])
            self.pipeline.steps_taken = state["random"]["steps_taken"]
            for name, value in state["loss_scale"].items():
                setattr(self.scaler, name, value)
        else:
            with self.whole_parameters():
                output_folder.begin(self.config, self.task, self.mesh, stages)
        if isinstance(self.loss, TaskLoss):
            # Values may have been drawn without the seed.
            checkpoint.check_replicas(self.mesh, stages)
            rehearse(self.reader, self.pipeline, self.done, self.loss)
        for stage in stages:
            # No other code than the optimizer changes parameters here.
            stage.optimizer_writes_compute()

    def run(self) -> Record:
        """Train, validate, show a sample, and return the last record."""
        config = self.config
        if self.done < config.steps and self.preemption.asked():
            self.preemption.leave(self.whereabouts())
        self._introduce()
        for step in range(self.done, config.steps):
            try:
                self.step(step)
                self.done = step + 1
                if self.recording is not None and self.recording.steps >= RECORDED:
                    self._write_trace()
                self._after_step()
            except MpipipeError as error:
                error.message = f"step {step + 1} of {config.steps}: {error.message}"
                raise
        return self._end()

    def _introduce(self) -> None:
        """Say what is trained, and validate what a new training begins with."""
        task = self.task
        shape = self.mesh.shape
        say = self.reporter.say
        schedule = self.pipeline.schedule
        place = "GPUs"
        if self.stages[0].device == "cpu":
            place = "CPUs"
        say(
            f"mpipipe: {counted(self.group.size, 'rank')} = "
            f"pipe {shape.pipe} x data {shape.data} x seq {shape.seq}; "
            f"{schedule.name}, {counted(schedule.stages, 'stage')}, {schedule.batch}\n"
            f"mpipipe: {task.description(place)}\n"
            f"mpipipe: metrics in {self.out}"
        )
        if self.done:
            say(f"mpipipe: goes on after step {self.done}")
            return
        beginning = task.beginning()
        init = getattr(self.config, "init", None)
        if init is not None:
            beginning = f"the weights in {init}"
        if beginning:
            say(f"mpipipe: begins with {beginning}")
        warning = seq_warning(task, self.reader.shard)
        if warning:
            say(warning)
        self._report(self._validated(Record(0)))

    def _after_step(self) -> None:
        """Compare replicas, validate, report, save and leave, where it is time for that."""
        config = self.config
        done = self.done
        if config.check_weights and done % config.check_weights == 0:
            checkpoint.check_replicas(self.mesh, self.stages, self.optimizer)
        ends = done == config.steps
        validates = ends or done % config.eval_every == 0
        if validates or done == 1 or done % config.log_every == 0:
            self._record(validates)
        leaves = not ends and self.preemption.due(self.saver.in_flight)
        every = config.save_every
        saves = leaves or (every and (ends or done % every == 0))
        finish = self.saver.poll
        if saves:
            # No checkpoint is of a training that has failed.
            self._read()
            finish = self.saver.wait
        if finish() is not None:
            self.preemption.save_took(self.saver.seconds)
        if not saves:
            return
        self.saver.save(done, self._state(), beforehand=self.reporter.sync)
        if leaves:
            self.saver.wait()
            self._write_trace()
            self.preemption.leave(self.whereabouts())

    def _record(self, validates: bool) -> None:
        loss, norm = self._read()
        self.group.agree(
            "train: a record",
            (("learning rate", self.lr),),
            message="ranks make steps with different learning rates",
            remedy="let rate_at depend on the step and the configuration alone",
        )
        times = self._times()
        facts = self.speed(times - self.recorded) | self.task.derived(loss, None)
        self.recorded = times
        if self.scaler.dynamic:
            facts |= {"loss_scale": self.scaler.scale, "skipped": self.scaler.skipped}
        record = Record(self.done, loss, lr=self.lr, grad_norm=norm, **facts)
        if validates:
            record = self._validated(record)
        self._report(record)

    def _report(self, record: Record) -> None:
        with self.group.raise_together("train: whether the folder is still this job's"):
            if self.mesh.rank == 0:
                checkpoint.check_owned(self.out)
        self.record = record
        self.reporter.record(record)

    def _end(self) -> Record:
        """Leave the weights, a sample, and the last line."""
        task = self.task
        self._write_trace()
        self.saver.wait()
        record = self.record
        if record.validation is None:
            # A training that was resumed at its end, which was no end before.
            record = self._validated(replace(record, step=self.done))
        with self.whole_parameters():
            plan = self.reader.plan
            task.save(self.out, plan, self.stages, self.mesh, self.done)
            sample = task.sample(plan, self.pipeline, self.mesh, self.reader.shard) or self._shown()
        if sample:
            self.reporter.say(sample)
        record = replace(record, **self.speed(self._times()))
        self.reporter.say(f"mpipipe: ok steps={record.step}{summary(record, task.unit)}")
        return record

    def _state(self) -> Values:
        """Return what a checkpoint remembers besides arrays."""
        scaler = self.scaler
        return {
            **output_folder.facts_of(self.config, self.task),
            "record": finite(self.record.facts()),
            "random": {"steps_taken": self.pipeline.steps_taken},
            "loss_scale": {"scale": scaler.scale, "good": scaler.good, "skipped": scaler.skipped},
        }

    def whereabouts(self) -> str:
        """Return after which step this is, and in a second line how to go on."""
        steps = self.config.steps
        saved = checkpoint.newest(self.out)
        place = f"after step {self.done} of {steps}"
        if saved is not None:
            return f"{place}\n--resume auto --out {self.out} goes on from {saved.name}"
        if self.done:
            return f"{place}; nothing is saved to go on from\nmetrics are in {self.out}"
        return (
            f"before step 1 of {steps}; there is nothing to save\n"
            f"--resume auto --out {self.out} begins"
        )

    def step(self, step: int) -> None:
        """Make one step. On a GPU with the whole model it is under way when this returns."""
        config = self.config
        start = perf_counter()
        made = self.spent[0]
        if self.trace is not None and (made == 1 or (made == 0 and step + 1 == config.steps)):
            self.recording = Recording(self.pipeline, self.mesh.comm)
        # Where a trace is recorded, parts of the step are marked in it.
        with getattr(self.recording, "reading", nullcontext)():
            batch = self.reader.batch(step)
        waited = perf_counter() - start
        self.lr = checked_rate(self.task, step, config)
        scaler = self.scaler
        self.result = self.pipeline.step(*batch, scale=scaler.scale)
        with getattr(self.recording, "optimizer", nullcontext)():
            optimizer = self.optimizer
            # An optimizer of the task's own does not wait for a save that still reads.
            nn.announce_write(optimizer, *optimizer.stages)
            with self._as_replicas():
                self.norm_of_step = optim.scaled_step(
                    optimizer, scaler, config.clip, self.lr, self.pipe
                )
        self.spent += 1, perf_counter() - start, waited

    def _write_trace(self) -> None:
        """Write the trace of the steps recorded so far, if there are any; collective."""
        recording = self.recording
        self.recording = None
        if recording is None:
            return
        recording.end()
        trace = recording.trace
        if trace is None or self.trace is None:
            return
        say = self.reporter.say
        steps = trace.records[0].steps
        say(f"mpipipe: where the time of {counted(len(steps), 'step')} went\n{trace.table()}")
        try:
            trace.write(self.trace)
            say(f"mpipipe: the trace is in {self.trace}")
        except (OSError, ArgumentError) as error:
            # No reason to lose a training.
            say(f"mpipipe: the trace cannot be written: {error}")

    def _read(self) -> tuple[float, float | None]:
        """Return loss and norm (None if skipped) of the last step on all ranks; waits for a GPU.

        NonFiniteError says which step had a loss or gradient that is not finite, this one or one
        before.
        """
        start = perf_counter()
        loss = self.result.loss
        with self._as_replicas():
            self.scaler.read_norms(wait=True)
        norm = None
        if self.norm_of_step is not None:
            norm = float(self.norm_of_step)
        self.spent[1] += perf_counter() - start
        return loss, norm

    def _times(self) -> arrays.Array:
        """Return steps and seconds so far, and of these busy and elapsed ones of the pipeline."""
        steps, seconds, waited = self.spent
        busy, elapsed = self.pipeline.training_seconds
        return np.array([steps, seconds, busy, elapsed + waited])

    @contextmanager
    def _as_replicas(self) -> Iterator[None]:
        """Raise NonFiniteError on all ranks: replicas have the same sums of gradients."""
        try:
            yield
        except NonFiniteError as error:
            raise agreed_by(error, self.group) from None

    def _validated(self, record: Record) -> Record:
        """Return a record with the mean loss and the metrics over the validation; collective.

        Where the loss returns weights, each batch counts by the sum of its weights.
        """
        scores = None
        if isinstance(self.loss, TaskLoss) and self.loss.has_metrics:
            scores = self.loss
            scores.sums = Counter()
        total = 0.0
        weights = 0.0
        for index in range(self.config.eval_batches):
            value, weight = call(
                self.task,
                "layers",
                *self.reader.pair("validation", index),
                when=" in the validation",
                by=self.pipeline.weighed_evaluation,
            )
            total += value * weight
            weights += weight
        validation = total / weights
        metrics = {}
        if scores is not None:
            metrics = scores.means(self.group)
        more = self.task.derived(record.loss, validation)
        return replace(record, validation=validation, metrics=metrics, **more)

    def _shown(self) -> str:
        """Return what `Task.show` says of the first micro-batch of the validation; collective."""
        task = self.task
        if type(task).show is Task.show:
            return ""
        shard = self.reader.shard
        group = self.group
        inputs = None
        targets = None
        with group.raise_together("train: the batch to show"):
            if self.reader.reads:
                rows = self.reader.rows[: self.reader.plan.microbatch_rows]
                inputs, targets, _ = read(task, "validation", 0, rows, shard)
        output = self.pipeline.forward(inputs)
        text = ""
        with group.raise_together("train: what the task shows"):
            if shard.reads_targets and self.mesh.data.rank == 0:
                y = arrays.mapped(arrays.on_host, output)
                goal = arrays.mapped(arrays.on_host, targets)
                try:
                    text = str(call(task, "show", y, goal, shard) or "")
                except MpipipeError as error:
                    # The training is done and saved. A program that was to end here says so as
                    # before.
                    if isinstance(error.__cause__, SystemExit):
                        raise
                    text = f"mpipipe: warning: {error.message}"
        return next(filter(None, group.gather("train: what the task shows", text)), "")

    def speed(self, times: arrays.Array) -> Values:
        """Return samples per second, bubble and predicted bubble of some steps; collective."""
        if times[0] == 0:
            return {}
        pipeline = self.pipeline
        of_ranks = self.group.gather("train: the time of all ranks", times.tolist())
        steps, seconds, busy, elapsed = zip(*of_ranks)
        return {
            self.task.per_second: steps[0] * self.config.batch * self.task.units / max(seconds),
            "bubble": 1 - sum(busy) / sum(elapsed),
            "predicted": schedules.simulate(
                pipeline.schedule, pipeline.durations()
            ).bubble_fraction,
        }


# -- `train --trace DIR`: a few early steps are recorded, and written once they are made -----------
#
# Steps 2 to 17 of this start are recorded; if there is only one step, that one. The first step is
# unlike the others: memory is allocated and shapes are agreed on. Validation and checkpoints belong
# to no step.


# Number of steps.
RECORDED = 16


def trace_folder(comm: Communicator, config: TaskConfig) -> Path | None:
    """Return where a trace will be written; the same error on every rank where it cannot be.

    A training that is resumed was perhaps traced before it was ended: nothing is recorded then
    where the folder exists.
    """
    if config.trace is None:
        return None
    folder = Path(output_folder.shared_path(comm, config.trace))

    def find() -> Path | None:
        if config.resume != "no" and folder.exists():
            return None
        check_new(folder)
        return folder

    return group_of(comm).from_one("train: the folder of the trace", find)
