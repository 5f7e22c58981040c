"""The training loop: batches through the pipeline, the optimizer, validation, and the report of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from mpipipe import optim
from mpipipe.attention import Local
from mpipipe.checkpoint import owner
from mpipipe.comm.consensus import agreed_by
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.preemption import Preemption
from mpipipe.errors import NonFiniteError
from mpipipe.nn.lora import without_adapters
from mpipipe.train import leaving, limits, resume, weights
from mpipipe.train.base import Base
from mpipipe.train.batches import Batches
from mpipipe.train.checkpoints import Checkpoints
from mpipipe.train.commitment import Commitment, Outcome
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Source
from mpipipe.train.decoder import build_decoder
from mpipipe.train.introduction import introduction
from mpipipe.train.language import Language
from mpipipe.train.preparation import PROMPT_BYTES
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Record, Reporter, summary
from mpipipe.train.result import leave_model
from mpipipe.train.sample import continued
from mpipipe.train.screen import folded
from mpipipe.train.shard import Shard
from mpipipe.train.step_times import StepTimes, shared_speed
from mpipipe.train.tracing import Tracing
from mpipipe.train.training_plan import TrainingPlan


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
        language: Language,
        reporter: Reporter | NullReporter,
        out: Path,
        base: Base | None = None,
        trace: Path | None = None,
    ) -> None:
        self.config, self.mesh, self.plan, self.shard, self.progress = config, mesh, plan, shard, progress
        self.norm, self.data, self.reporter, self.out, self.preemption = norm, data, reporter, out, preemption
        self.pipeline, self.optimizer, self.scaler = progress.pipeline, progress.optimizer, progress.scaler
        self.base, self.language = base, language
        self.facts: dict[str, Any] = {}  # for checkpoints
        self.checkpoints = Checkpoints(config, resume.checkpoints_of(out), progress, reporter, preemption)
        for stage in self.pipeline.stages:
            stage.keep_compute()  # nobody but the optimizer changes parameters here
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
        with group_of(self.mesh.comm).together("train: whether the folder is still this job's"):
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
        leave_model(self.out, self.config, self.plan, self.pipeline.stages, self.mesh, self.base)
        self.reporter.draw_losses()
        self._show_sample()
        if self.in_all.steps:
            record = replace(record, **shared_speed(self.in_all, self.config, self.mesh, self.pipeline))
        self.reporter.say(f"mpipipe: ok steps={record.step}{summary(record)}{self.language.summary(record)}")
        return record

    def whereabouts(self) -> str:
        """Return what whoever interrupts this training wants to know."""
        return leaving.whereabouts(self.progress.step, self.config.steps, self.out)

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
        loss = pending.result().loss  # on its way since the backward ended: the norm has taken as long
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
