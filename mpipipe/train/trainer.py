"""The training loop: batches through the pipeline, the optimizer, validation, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import arrays, checkpoint, optim
from mpipipe.attention import kernels
from mpipipe.comm import runtime
from mpipipe.comm.consensus import agreed_by
from mpipipe.comm.device import select_device
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.types import Communicator
from mpipipe.comm.watch.membership import watching
from mpipipe.errors import NonFiniteError
from mpipipe.pipeline import Pipeline
from mpipipe.train import interrupt, output, resume, weights
from mpipipe.train.architecture import Architecture
from mpipipe.train.commitment import Commitment, Outcome
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Batch, Corpus, training_batch, validation_batch
from mpipipe.train.decoder import build_decoder
from mpipipe.train.introduction import introduction
from mpipipe.train.preparation import PROMPT_BYTES, check_same_config, make_plan, make_reporter, open_corpus
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Record, Reporter, summary
from mpipipe.train.sample import generate, readable
from mpipipe.train.shard import Shard
from mpipipe.train.step_times import StepTimes, shared_speed
from mpipipe.train.survival import Crew
from mpipipe.train.training_plan import TrainingPlan


def train(config: TrainConfig, architecture: Architecture, comm: Communicator | None = None) -> Record:
    """Train a model on bytes, on all ranks of a communicator; collective.

    Progress goes to the standard output of rank 0, and to metrics.jsonl in `config.out`. That folder must be new or
    empty, unless the training is resumed; a relative path begins in the working folder of rank 0. A standard output
    that is closed and metrics that cannot be written do not end the training. A checkpoint that cannot be written does.

    Parameters
    ----------
    config : TrainConfig
        The same on every rank.
    architecture : callable
        Makes the model from the sizes in `config`, such as `models.GPT`.
    comm : communicator, optional
        The ranks, COMM_WORLD by default. It is duplicated.

    Returns
    -------
    Record
        The state at the end of the training. Its speed and bubble are those of all steps since it was started.

    Raises
    ------
    ConfigError, DataError, MismatchError, ArgumentError
        On every rank, before anything is written.
    BackendError
        On every rank, where the device is missing.
    NonFiniteError
        Where the loss is NaN or infinite. So is it where a gradient is, and no smaller loss scale can help.

    Examples
    --------
    >>> import tempfile
    >>> from mpipipe.comm import inprocess
    >>> from mpipipe.models import GPT
    >>> from mpipipe.train import TrainConfig, train
    >>> config = TrainConfig(
    ...     dim=8, layers=1, heads=1, seq_len=8, batch=4, steps=2, sample_bytes=0, device="cpu", out=tempfile.mkdtemp()
    ... )
    >>> records = inprocess.run(2, lambda comm: train(config, GPT, comm))  # doctest: +ELLIPSIS
    mpipipe: 2 ranks = pipe 2 x data 1 x seq 1; one_f_one_b, 2 stages, 4 micro-batches
    ...
    mpipipe: ok steps=2 ...
    >>> records[0].step
    2
    """
    comm = runtime.resolve(comm)
    check_same_config(group_of(comm), config)
    out = Path(output.shared_path(comm, config.out))
    pipe = max(1, comm.size // config.seq) if config.pipe is None else config.pipe
    if config.survive:
        crew = Crew(config, comm, pipe, out)
        with watching(config.watchdog, out):
            return crew.train(lambda mesh: _train_in(mesh, config, architecture, out, crew))
    with group_of(comm).together("train: the mesh"):
        mesh = Mesh(comm, pipe=pipe, seq=config.seq)
    with watching(config.watchdog, out), mesh:
        return _train_in(mesh, config, architecture, out)


def _train_in(mesh: Mesh, config: TrainConfig, model: Architecture, out: Path, crew: Crew | None = None) -> Record:
    device = select_device(config.device, mesh.comm)
    if crew is not None:
        crew.check_device(device)
    with arrays.own_stream(device):
        return _train_on(device, config, model, mesh, out, crew)


def _train_on(place: str, config: TrainConfig, model: Architecture, mesh: Mesh, out: Path, crew: Crew | None) -> Record:
    survivor = crew if crew is not None and crew.goes_on else None  # has the state of the training in memory
    group = group_of(mesh.comm)
    plan = make_plan(config, model, mesh, place)
    corpus, fingerprint = open_corpus(config, plan, mesh)
    start = None if survivor else resume.find_start(config, plan, mesh, out, fingerprint)
    with group.together("train: the shards of sequences"):
        shard = Shard(mesh.seq, config.layout, config.seq_len)
    with group.together("train: the stages"):
        kernels.check_choice(place)
        stages = plan.stages(mesh.pipe.rank, shard, config.dtype, config.seed, place)
    with (
        Pipeline(
            stages, plan.schedule, mesh.pipe, loss=shard.loss, recompute=config.recompute, replicas=mesh.replicas
        ) as pipeline,
        optim.GlobalNorm(stages, mesh.pipe, replicas=mesh.replicas) as norm,
    ):
        progress = Progress(config, pipeline, mesh)
        if survivor:
            survivor.restore(progress)
        elif start is not None:
            progress.load(start)
        elif config.init is not None:
            resume.load_weights(config.init, mesh, stages)
        output.make_folder(out, mesh.comm, writes=mesh.replicas.rank == 0 or config.save_every > 0)
        with group.together("train: the reporter"):
            make = survivor.reporter if survivor else partial(make_reporter, config, out, start)
            reporter = make() if mesh.rank == 0 else NullReporter()
        with reporter:
            trainer = Trainer(config, mesh, plan, shard, progress, norm=norm, corpus=corpus, reporter=reporter, out=out)
            trainer.facts = resume.facts_of(config, plan, fingerprint)
            if crew is not None:
                crew.enlist(trainer)
            with interrupt.told(trainer.whereabouts):
                return trainer.run()


class Trainer:
    """One training under way on this rank.

    Parameters
    ----------
    config : the same on every rank
    mesh, plan, shard : where this rank stands, and what it runs
    progress : how far the training has come, with its pipeline and optimizer
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
        *,
        norm: optim.GlobalNorm,
        corpus: Corpus | None,
        reporter: Reporter | NullReporter,
        out: Path,
    ) -> None:
        self.config, self.mesh, self.plan, self.shard, self.progress = config, mesh, plan, shard, progress
        self.norm, self.corpus, self.reporter, self.out = norm, corpus, reporter, out
        self.pipeline, self.optimizer, self.scaler = progress.pipeline, progress.optimizer, progress.scaler
        self.facts: dict[str, Any] = {}
        for stage in self.pipeline.stages:
            stage.keep_compute()  # nobody but the optimizer changes parameters here
        self.first = mesh.pipe.rank == plan.schedule.placement[0]
        self.last = mesh.pipe.rank == plan.schedule.placement[-1]
        self.rows = slice(mesh.data.rank * plan.rows, (mesh.data.rank + 1) * plan.rows)  # of a batch, for this replica
        self.since_record, self.in_all = StepTimes(), StepTimes()
        self.outcome: Outcome = 0.0, 0.0, None  # of the last step
        self.reported = progress.step  # number of steps behind which nothing is left to do
        self.commitment = Commitment(progress, group_of(mesh.comm), config.survive)

    def run(self) -> Record:
        """Train, validate, show a sample of text, and return the last record."""
        config, progress = self.config, self.progress
        place = "CPUs" if self.pipeline.stages[0].device == "cpu" else "GPUs"
        self.reporter.say(introduction(config, self.plan, self.mesh, self.corpus, place, self.out))
        if progress.step:
            self.reporter.say(f"mpipipe: goes on behind step {progress.step}")
        if progress.step == 0:
            self._report(Record(0, validation=self.validate()))
        elif self.reported < progress.step:  # ranks have died meanwhile
            self._after_step()
        for step in range(progress.step, config.steps):
            self.outcome = self.step(step)
            progress.step = step + 1
            self._after_step()
        return self._end()

    def _after_step(self) -> None:
        """Validate, report and save, where the step asks for it."""
        config, done, (loss, lr, norm) = self.config, self.progress.step, self.outcome
        validated = done % config.eval_every == 0 or done == config.steps
        if validated or done == 1 or done % config.log_every == 0:
            validation = self.validate() if validated else None
            speed = shared_speed(self.since_record, config, self.mesh, self.pipeline)
            self._report(Record(done, loss, validation, lr, norm, **speed, **self.commitment.scaling()))
            self.since_record = StepTimes()
        if config.save_every and (done % config.save_every == 0 or done == config.steps):
            self.reporter.sync()
            self.progress.save(resume.checkpoints_of(self.out), self.facts, config.keep)
        self.reported = done

    def _report(self, record: Record) -> None:
        self.progress.record = record
        self.reporter.record(record)

    def _end(self) -> Record:
        """Leave the weights, a sample, and the last line."""
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
        done, steps, saved = self.progress.step, self.config.steps, checkpoint.newest(resume.checkpoints_of(self.out))
        rest = "nothing is saved to go on from" if saved is None else f"--resume auto goes on from {saved.name}"
        return f"after step {done} of {steps}; metrics are in {self.out}, and {rest}"

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
