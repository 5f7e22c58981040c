"""The training loop: batches through the pipeline, the optimizer, validation, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import optim
from mpipipe.comm.consensus import agreed_by
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.preemption import Preemption
from mpipipe.errors import NonFiniteError
from mpipipe.train import leaving, resume, weights
from mpipipe.train.checkpoints import Checkpoints
from mpipipe.train.commitment import Commitment, Outcome
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Batch, Corpus, training_batch, validation_batch
from mpipipe.train.decoder import build_decoder
from mpipipe.train.introduction import introduction
from mpipipe.train.preparation import PROMPT_BYTES
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Record, Reporter, summary
from mpipipe.train.sample import generate, readable
from mpipipe.train.shard import Shard
from mpipipe.train.step_times import StepTimes, shared_speed
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
    corpus : the data, on the ranks of the first and the last stage; None elsewhere
    reporter : Reporter on rank 0, NullReporter elsewhere
    out : the output folder
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
        corpus: Corpus | None,
        reporter: Reporter | NullReporter,
        out: Path,
    ) -> None:
        self.config, self.mesh, self.plan, self.shard, self.progress = config, mesh, plan, shard, progress
        self.norm, self.corpus, self.reporter, self.out, self.preemption = norm, corpus, reporter, out, preemption
        self.pipeline, self.optimizer, self.scaler = progress.pipeline, progress.optimizer, progress.scaler
        self.facts: dict[str, Any] = {}  # for checkpoints
        self.checkpoints = Checkpoints(config, resume.checkpoints_of(out), progress, reporter, preemption)
        for stage in self.pipeline.stages:
            stage.keep_compute()  # nobody but the optimizer changes parameters here
        self.first = mesh.pipe.rank == plan.schedule.placement[0]
        self.last = mesh.pipe.rank == plan.schedule.placement[-1]
        self.rows = slice(mesh.data.rank * plan.rows, (mesh.data.rank + 1) * plan.rows)  # of a batch, for this replica
        self.since_record, self.in_all = StepTimes(), StepTimes()
        self.outcome: Outcome = 0.0, 0.0, None  # of the last step
        self.reported = progress.step or -1  # number of steps behind which nothing is left to do
        self.commitment = Commitment(progress, group_of(mesh.comm), config.survive)

    def run(self) -> Record:
        """Train, validate, show a sample of text, and return the last record."""
        config, progress = self.config, self.progress
        place = "CPUs" if self.pipeline.stages[0].device == "cpu" else "GPUs"
        self.reporter.say(introduction(config, self.plan, self.mesh, self.corpus, place, self.out))
        if progress.step:
            self.reporter.say(f"mpipipe: goes on behind step {progress.step}")
        if self.reported < 0:
            self._report(Record(0, validation=self.validate()))
            self.reported = 0
        elif self.reported < progress.step:  # ranks have died meanwhile
            self._after_step()
        elif self.checkpoints.owed:
            self.checkpoints.follow(self.facts, leaves=False)
        for step in range(progress.step, config.steps):
            self.outcome = self.step(step)
            progress.step = step + 1
            self._after_step()
        return self._end()

    def _after_step(self) -> None:
        """Compare replicas, validate, report, save and leave, where the step or somebody else asks for it."""
        config, done, (loss, lr, norm) = self.config, self.progress.step, self.outcome
        self.progress.check_weights(config.check_weights)
        validated = done % config.eval_every == 0 or done == config.steps
        if validated or done == 1 or done % config.log_every == 0:
            validation = self.validate() if validated else None
            speed = shared_speed(self.since_record, config, self.mesh, self.pipeline)
            self._report(Record(done, loss, validation, lr, norm, **speed, **self.commitment.scaling()))
            self.since_record = StepTimes()
        leaves = done < config.steps and self.preemption.due(self.checkpoints.saver.in_flight)
        self.checkpoints.follow(self.facts, leaves)
        if leaves:
            self.preemption.leave(self.whereabouts() if self.mesh.rank == 0 else "")
        self.reported = done

    def _report(self, record: Record) -> None:
        self.progress.record = record
        self.reporter.record(record)

    def _end(self) -> Record:
        """Leave the weights, a sample, and the last line."""
        self.checkpoints.finish("the training ends without it")
        record, model = self.progress.record, self.plan.model
        if record.validation is None:  # a training that was resumed at its end, which was no end before
            record = replace(record, step=self.progress.step, validation=self.validate())
        weights.save(weights.folder_of(self.out), model, self.pipeline.stages, self.plan.schedule, self.mesh)
        self._show_sample()
        if self.in_all.steps:
            record = replace(record, **shared_speed(self.in_all, self.config, self.mesh, self.pipeline))
        self.reporter.say(f"mpipipe: ok steps={record.step}{summary(record)}")
        return record

    def whereabouts(self) -> str:
        """Return what whoever interrupts this training wants to know."""
        return leaving.whereabouts(self.progress.step, self.config.steps, self.out)

    def step(self, step: int) -> tuple[float, float, float | None]:
        """Make one optimizer step, and return its loss, learning rate and gradient norm, the same on every rank.

        The norm is None where the step was skipped.
        """
        config, start = self.config, perf_counter()
        self.commitment.begin(step)
        shape = dict(batch=config.batch, seq_len=config.seq_len)
        inputs, targets = self._batch(
            lambda corpus: training_batch(corpus.train, seed=config.seed, step=step, rows=self.rows, **shape)
        )
        result = self.pipeline.step(inputs, targets, scale=self.scaler.scale)
        lr = optim.warmup_cosine(step, config.steps, config.lr, min(config.warmup, config.steps))
        try:
            norm = optim.scaled_step(self.commitment, self.scaler, config.clip, lr=lr, over=self.norm)
        except NonFiniteError as error:  # the replicas have the same sums of gradients, so they raise it, too
            raise agreed_by(error, group_of(self.mesh.comm)) from None
        if norm is None:
            self.commitment.skip()
        seconds = perf_counter() - start
        for times in (self.since_record, self.in_all):
            times.add(seconds, self.pipeline.busy, self.pipeline.elapsed)
        self.reporter.advance()
        return result.loss, lr, norm

    def validate(self) -> float:
        """Return the mean loss over the validation windows, always the same ones; on every rank."""
        config, count = self.config, self.config.eval_batches

        def draw(corpus: Corpus, index: int) -> Batch:
            shape = dict(index=index, batches=count, batch=config.batch, seq_len=config.seq_len)
            return validation_batch(corpus.validation, rows=self.rows, **shape)

        return sum(self.pipeline.evaluate(*self._batch(partial(draw, index=each))) for each in range(count)) / count

    def _batch(self, draw: Callable[[Corpus], Batch]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Draw this replica's rows, and cut out this rank's share: inputs for the first stage, targets for the last."""
        if self.corpus is None:
            return None, None
        inputs, targets = draw(self.corpus)
        cut = self.shard.cut
        return cut(inputs) if self.first else None, cut(targets) if self.last else None

    def _show_sample(self) -> None:
        config, plan = self.config, self.plan
        if config.sample_bytes == 0:
            return
        prompt = None
        if self.first and self.corpus is not None:
            text = self.corpus.validation
            prompt = text.read(0, min(PROMPT_BYTES, len(text))).tobytes()
        root = plan.schedule.placement[0]
        prompt = group_of(self.mesh.pipe).broadcast("train: the prompt of the sample", prompt, root)
        count = config.sample_bytes
        dtype = self.pipeline.stages[0].parameters.flat.dtype.name
        copy = partial(weights.copy, self.pipeline.stages)
        with build_decoder(plan, self.mesh, dtype, len(prompt) + count, copy) as decoding:
            answer = generate(decoding, self.mesh, prompt, count, temperature=config.temperature, seed=config.seed)
        title = f"--- sample: {len(prompt)} bytes of validation text, {len(answer)} of the model's"
        self.reporter.say("\n".join([title, readable(prompt + answer), "---"]))
