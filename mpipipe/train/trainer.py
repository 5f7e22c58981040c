"""The training loop: batches through the pipeline, the optimizer, validation, and the report of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from mpipipe import checkpoint, optim, schedules
from mpipipe.attention import Local
from mpipipe.checkpoint import owner
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import NonFiniteError
from mpipipe.job.consensus import agreed_by
from mpipipe.job.group import group_of
from mpipipe.job.preemption import Preemption, parse_duration
from mpipipe.job.stop_signals import parse_signals
from mpipipe.language.data import Source, Tokens
from mpipipe.language.data.windows import read_windows, segments, training_starts, validation_starts
from mpipipe.language.inference.generation import build_decoder, continued
from mpipipe.language.models import weights
from mpipipe.language.models.pretrained import PretrainedModel, export_model
from mpipipe.nn.lora import without_adapters
from mpipipe.pipeline import Pipeline
from mpipipe.text import counted
from mpipipe.train import limits, resume
from mpipipe.train.config import TrainConfig
from mpipipe.train.preparation import PROMPT_BYTES, TokenUnits
from mpipipe.train.progress import Commitment, Outcome, Progress
from mpipipe.train.report import NullReporter, Record, Reporter, summary
from mpipipe.train.resume import Checkpoints
from mpipipe.train.screen import folded
from mpipipe.train.tracing import Tracing
from mpipipe.train.training_plan import Shard, TrainingPlan


class Trainer:
    """One training under way on this rank.

    Parameters
    ----------
    config : the same on every rank
    mesh, plan, shard : where this rank stands, and what it runs
    progress : how far the training has come, with its pipeline and optimizer
    preemption : when the job has to leave
    norm : over which stages and ranks gradients are clipped
    data : the data, on the ranks that read them; None elsewhere
    language : what the data are
    reporter : Reporter on rank 0, NullReporter elsewhere
    out : the output folder
    base : the model that it began from, if it did
    trace : where to write a trace of some steps, if at all
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        plan: TrainingPlan,
        shard: Shard,
        progress: Progress,
        preemption: Preemption,
        *,
        norm: optim.GlobalNorm,
        data: Source | None,
        language: TokenUnits,
        reporter: Reporter | NullReporter,
        out: Path,
        base: PretrainedModel | None = None,
        trace: Path | None = None,
    ) -> None:
        self.config, self.mesh, self.plan, self.shard, self.progress = config, mesh, plan, shard, progress
        self.norm, self.data, self.reporter, self.out, self.preemption = norm, data, reporter, out, preemption
        self.pipeline, self.optimizer, self.scaler = progress.pipeline, progress.optimizer, progress.scaler
        self.base, self.language = base, language
        self.facts: dict[str, Any] = {}  # for checkpoints
        self.checkpoints = Checkpoints(config, resume.checkpoints_of(out), progress, reporter, preemption)
        for stage in self.pipeline.stages:
            stage.optimizer_writes_compute()  # nobody but the optimizer changes parameters here
        self.batches = Batches(config, mesh, plan, shard, data)
        self.since_record, self.in_all = StepTimes(), StepTimes()
        self.outcome: Outcome = 0.0, 0.0, None  # of the last step
        self.reported = progress.step or -1  # number of steps behind which nothing is left to do
        self.in_memory = False  # whether the state comes from ranks that live on: no checkpoint may hold it
        self.commitment = Commitment(progress, group_of(mesh.comm), config.survive)
        self.tracing = Tracing(trace, self.pipeline, mesh, reporter.say)

    def run(self) -> Record:
        """Train, validate, show a sample of text, and return the last record."""
        config, progress = self.config, self.progress
        if progress.step < config.steps and not self.in_memory and self.preemption.asked():
            self.preemption.leave(self.whereabouts() if self.mesh.rank == 0 else "")
        place = "CPUs" if self.pipeline.stages[0].device == "cpu" else "GPUs"
        self.reporter.say(
            introduction(config, self.plan, self.mesh, self.data, self.language.unit, place=place, out=self.out)
        )
        if progress.step:
            self.reporter.say(f"mpipipe: goes on behind step {progress.step}")
        elif self.base is not None:
            self.reporter.say(f"mpipipe: begins with the model in {self.base.folder.path}")
        if self.reported < 0:
            validation = self.validate()
            self._report(Record(0, validation=validation, **self.language.bits(None, validation)))
            self.reported = 0
        elif self.reported < progress.step:  # ranks have died meanwhile
            self._after_step()
        elif self.checkpoints.owed:
            self.checkpoints.follow(self.facts, leaves=False)
        for step in range(progress.step, config.steps):
            self.outcome = self.step(step)
            progress.step = step + 1
            self.tracing.end_step()
            self._after_step()
        return self._end()

    def _after_step(self) -> None:
        """Compare replicas, validate, report, save and leave, where the step or somebody else asks for it."""
        config, done, (loss, lr, norm) = self.config, self.progress.step, self.outcome
        self.progress.check_weights(config.check_weights)
        validated = done % config.eval_every == 0 or done == config.steps
        if validated or done == 1 or done % config.log_every == 0:
            validation = self.validate() if validated else None
            more = shared_speed(self.since_record, config, self.mesh, self.pipeline)
            more |= self.commitment.scaling() | self.language.bits(loss, validation)
            self._report(Record(done, loss, validation, lr, norm, **more))
            self.since_record = StepTimes()
        leaves = done < config.steps and self.preemption.due(self.checkpoints.saver.in_flight)
        self.checkpoints.follow(self.facts, leaves)
        if leaves:
            self.tracing.finish()
            self.preemption.leave(self.whereabouts() if self.mesh.rank == 0 else "")
        self.reported = done

    def _report(self, record: Record) -> None:
        with group_of(self.mesh.comm).raise_together("train: whether the folder is still this job's"):
            if self.mesh.rank == 0:
                owner.check(self.out)
        self.progress.record = record
        self.reporter.record(record)

    def _end(self) -> Record:
        """Leave the weights, a sample, and the last line."""
        self.tracing.finish()
        self.checkpoints.finish("the training ends without it")
        record = self.progress.record
        if record.validation is None:  # a training that was resumed at its end, which was no end before
            validation = self.validate()
            record = replace(
                record, step=self.progress.step, validation=validation, **self.language.bits(record.loss, validation)
            )
        export_model(self.out, self.config, self.plan, self.pipeline.stages, self.mesh, self.base)
        self.reporter.draw_losses()
        self._show_sample()
        if self.in_all.steps:
            record = replace(record, **shared_speed(self.in_all, self.config, self.mesh, self.pipeline))
        self.reporter.say(f"mpipipe: ok steps={record.step}{summary(record)}{self.language.summary(record)}")
        return record

    def whereabouts(self) -> str:
        """Return what whoever interrupts this training wants to know."""
        return whereabouts(self.progress.step, self.config.steps, self.out)

    def step(self, step: int) -> tuple[float, float, float | None]:
        """Make one optimizer step, and return its loss, learning rate and gradient norm, the same on every rank.

        The norm is None if the step was skipped.
        """
        config, start = self.config, perf_counter()
        self.commitment.begin(step)
        self.tracing.begin_step(config.steps - step)
        pending = self.pipeline.launch(*self.batches.training(step), scale=self.scaler.scale)
        lr = optim.warmup_cosine(step, config.steps, config.lr, min(config.warmup, config.steps))
        with self.tracing.optimizer():
            norm = self._optimize(lr)
        loss = pending.wait().loss  # on its way since the backward ended: the norm has taken as long
        seconds = perf_counter() - start
        for times in (self.since_record, self.in_all):
            times.add(seconds, self.pipeline.busy, self.pipeline.elapsed)
        self.reporter.advance()
        return loss, lr, norm

    def _optimize(self, lr: float) -> float | None:
        try:
            update = optim.begin_step(self.commitment, self.config.clip, scaler=self.scaler, lr=lr, over=self.norm)
            norm = update.finish()
        except NonFiniteError as error:  # the replicas have the same sums of gradients, so they raise it, too
            raise agreed_by(error, group_of(self.mesh.comm)) from None
        if norm is None:
            self.commitment.skip()
        return norm

    def validate(self) -> float:
        """Return the mean loss over the validation windows, always the same ones; on every rank."""
        count = self.config.eval_batches
        return sum(self.pipeline.evaluate(*self.batches.validation(each)) for each in range(count)) / count

    def _show_sample(self) -> None:
        """Let the model continue validation text, and show that; collective."""
        config, plan = self.config, self.plan
        if config.sample_bytes == 0:
            return
        room = limits.longest_text(plan.model.build(Local()))
        prompt = None
        if self.batches.first and self.data is not None:
            text = self.data.validation
            prompt = text.read(0, min(PROMPT_BYTES, len(text), PROMPT_BYTES if room is None else room // 2)).tolist()
        root = plan.schedule.placement[0]
        prompt = group_of(self.mesh.pipe).broadcast("train: the prompt of the sample", prompt, root)
        count = config.sample_bytes if room is None else min(config.sample_bytes, room - len(prompt))
        dtype = self.pipeline.stages[0].parameters.flat.dtype.name
        copy = partial(weights.copy, without_adapters(self.pipeline.stages, merged=True))
        alone = replace(plan, schedule=plan.schedule.forward_only_part(1))
        with build_decoder(alone, self.mesh, dtype, len(prompt) + count, copy) as decoding:
            answer = continued(
                decoding, prompt, count, self.language.vocab, temperature=config.temperature, seed=config.seed
            )
        title = f"--- sample: {len(prompt)} {self.language.unit} of validation text, {len(answer)} of the model's"
        self.reporter.say("\n".join([title, folded(self.language.text(prompt + answer)), "---"]))


# -- How a training leaves before its end: what it catches, and what it says of how to go on --------------------------


def preemption_of(config: TrainConfig, mesh: Mesh, reporter: Reporter | NullReporter) -> Preemption:
    """Return what says when the job has to leave, as configured; collective."""
    return Preemption(
        mesh.comm,
        signals=config.preempt_signals,
        time_limit=config.time_limit,
        grace=config.preempt_grace,
        say=reporter.say,
    )


def may_save(config: TrainConfig) -> bool:
    """Whether this training may save a checkpoint: at steps that are configured, or where it has to leave."""
    limited = config.time_limit is None or parse_duration(config.time_limit) > 0  # None: SLURM may set a limit
    return config.save_every > 0 or bool(parse_signals(config.preempt_signals)) or limited


def whereabouts(done: int, steps: int, out: Path) -> str:
    """Return after which step the training is, and in a second line how to go on: with the folder it may be long."""
    saved, place = checkpoint.newest(resume.checkpoints_of(out)), f"after step {done} of {steps}"
    if saved is None and done == 0:
        return f"before step 1 of {steps}; there is nothing to save\n--resume auto --out {out} begins"
    if saved is None:
        return f"{place}; nothing is saved to go on from\nmetrics are in {out}"
    return f"{place}\n--resume auto --out {out} goes on from {saved.name}"


# -- The time that steps of a training took ---------------------------------------------------------------------------


@dataclass
class StepTimes:
    """Time that one rank spent in some steps.

    Attributes
    ----------
    steps : number of them
    seconds : by the host's clock
    busy, elapsed : seconds that the pipeline measured
    """

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


def shared_speed(times: StepTimes, config: TrainConfig, mesh: Mesh, pipeline: Pipeline) -> dict[str, Any]:
    """Return tokens per second and the bubble of some steps, and the bubble that the stages' durations predict.

    Collective over the mesh. Nothing is returned for no steps at all.
    """
    if times.steps == 0:
        return {}
    costs = pipeline.durations()
    everyone = group_of(mesh.comm).gather("train: the time of all ranks", times)
    busy, elapsed = sum(each.busy for each in everyone), sum(each.elapsed for each in everyone)
    tokens = times.steps * config.batch * config.seq_len
    return {
        "tokens_per_second": tokens / max(each.seconds for each in everyone),
        "bubble": 1 - busy / elapsed,
        "predicted": schedules.simulate(pipeline.schedule, costs).bubble_fraction,
    }


# -- The batches of a training on this rank: its replica's rows, and its share of each sequence -----------------------


Share: TypeAlias = "tuple[np.ndarray | None, np.ndarray | None]"  # inputs and targets, None if they do not belong


class Batches:
    """Draws batches; every rank that needs one draws it by itself.

    Parameters
    ----------
    config : of the training
    mesh, plan, shard : where this rank stands
    data : on the ranks of the first and the last stage, on all with `config.packing` "segments"; None elsewhere

    Attributes
    ----------
    first, last : whether this rank has inputs, and targets
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, plan: TrainingPlan, shard: Shard, data: Source | None) -> None:
        self.config, self.shard, self.data = config, shard, data
        self.first = mesh.pipe.rank == plan.schedule.placement[0]
        self.last = mesh.pipe.rank == plan.schedule.placement[-1]
        self.rows = slice(mesh.data.rank * plan.rows, (mesh.data.rank + 1) * plan.rows)  # of a batch, for this replica

    def training(self, step: int) -> Share:
        """Return inputs for the first stage and targets for the last, of a step."""
        if self.data is None:
            return None, None
        config, text = self.config, self.data.train
        starts = training_starts(
            len(text), seed=config.seed, step=step, batch=config.batch, rows=self.rows, seq_len=config.seq_len,
            order=config.order,
        )  # fmt: skip
        return self._share(text, starts)

    def validation(self, index: int) -> Share:
        """Return the same of a batch of the validation, which has always the same ones."""
        if self.data is None:
            return None, None
        config, text = self.config, self.data.validation
        starts = validation_starts(
            len(text), index=index, batches=config.eval_batches, batch=config.batch, rows=self.rows,
            seq_len=config.seq_len,
        )  # fmt: skip
        return self._share(text, starts)

    def _share(self, text: Tokens, starts: list[int]) -> Share:
        seq_len, cut = self.config.seq_len, self.shard.cut
        if self.shard.packing is not None:
            self.shard.packing.begin(segments(text, starts, seq_len))
        if not (self.first or self.last):
            return None, None
        inputs, targets = read_windows(text, starts, seq_len)
        return cut(inputs) if self.first else None, cut(targets) if self.last else None


# -- The lines with which a training introduces itself ----------------------------------------------------------------


def introduction(
    config: TrainConfig, plan: TrainingPlan, mesh: Mesh, data: Source | None, unit: str, *, place: str, out: Path
) -> str:
    """Return what is trained, on which ranks, and where metrics go.

    `unit` is what a token is: bytes or tokens. `place` is what computes: CPUs or GPUs.
    """
    schedule = plan.schedule
    text = "" if data is None else f", {len(data.train):,} {unit} of text"
    return (
        f"mpipipe: {counted(mesh.comm.size, 'rank')} = "
        f"pipe {mesh.pipe.size} x data {mesh.data.size} x seq {mesh.seq.size}; "
        f"{schedule.name}, {counted(schedule.stages, 'stage')}, {counted(schedule.microbatches, 'micro-batch')}\n"
        f"mpipipe: {plan.model.parameters:,} parameters{_trained(plan)}, {config.dtype} on {place}, "
        f"batch {config.batch} x {config.seq_len} {unit}{text}\n"
        f"mpipipe: metrics in {out}"
    )


def _trained(plan: TrainingPlan) -> str:
    """Return how many parameters are trained, where that is not all of them."""
    tuning = plan.tuning
    if tuning.lora is not None:
        count = sum(entry.size for entry in tuning.trained(plan.model).values())
        return f" and {count:,} of adapters, which alone are trained"
    if tuning.freeze:
        sizes = {entry.tie or name: entry.size for name, entry in tuning.trained(plan.model).items()}
        return f" of which {sum(sizes.values()):,} are trained"
    return ""
