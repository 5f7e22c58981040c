"""The training loop: batches by step through the pipeline, optimizer, validation, and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from mpipipe import arrays, optim, schedules
from mpipipe.comm import runtime
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.device import select_device
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import MismatchError
from mpipipe.pipeline import Pipeline
from mpipipe.train import limits, output, weights
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Corpus, training_batch, validation_batch
from mpipipe.train.decoder import build_decoder
from mpipipe.train.report import NullReporter, Record, Reporter, on_terminal
from mpipipe.train.sample import generate, readable
from mpipipe.train.shard import Shard
from mpipipe.train.training_plan import TrainingPlan

PROMPT = 32  # bytes of validation text that the sample continues


def train(config: TrainConfig, architecture, comm=None) -> Record:
    """Train a model on bytes, on all ranks of `comm` (COMM_WORLD by default); collective.

    Progress goes to the standard output of rank 0, and to metrics.jsonl in `config.out`. That folder must be new or
    empty; a relative path begins in the working folder of rank 0. A standard output that is closed and metrics that
    cannot be written do not end the training.

    Parameters
    ----------
    config : the same on every rank
    architecture : makes the model from the sizes in `config`, such as models.GPT
    comm : is duplicated

    Returns
    -------
    Record : at the end of training; its speed and bubble are those of all steps

    Raises
    ------
    ConfigError, DataError, MismatchError, ArgumentError : on every rank, before anything is written
    BackendError : on every rank, where the device is not there
    NonFiniteError : the loss is NaN or infinite, or a gradient is and no smaller loss scale can help
    """
    comm = runtime.resolve(comm)
    _check_same_config(group_of(comm), config)
    config = replace(config, out=output.shared_path(comm, config.out))
    with group_of(comm).together("train: the mesh"):
        pipe = max(1, comm.size // config.seq) if config.pipe is None else config.pipe
        mesh = Mesh(comm, pipe=pipe, seq=config.seq)
    with mesh:
        group = group_of(mesh.comm)
        device = select_device(config.device, mesh.comm)
        plan, corpus = _prepare(config, architecture, mesh, device)
        with group.together("train: the shards of sequences"):
            shard = Shard(mesh.seq, config.layout, config.seq_len)
        with group.together("train: the stages"):
            stages = plan.stages(mesh.pipe.rank, shard, config.dtype, config.seed, device)
        with Pipeline(
            stages, plan.schedule, mesh.pipe, loss=shard.loss, recompute=config.recompute, replicas=mesh.replicas
        ) as pipeline:
            output.make_folder(Path(config.out), mesh.comm, writes=mesh.replicas.rank == 0)
            with group.together("train: the reporter"):
                reporter = _reporter(config) if mesh.rank == 0 else NullReporter()
            with reporter:
                return Trainer(config, mesh, plan, shard, pipeline, corpus, reporter).run()


def _check_same_config(group, config):
    group.agree(
        "train: the configuration",
        tuple((f"{key} =", repr(value)) for key, value in vars(config).items()),
        message="the ranks have different configurations",
        remedy="give the same file and flags to all ranks",
    )


def _prepare(config, architecture, mesh, device):
    """(TrainingPlan, Corpus or None where this rank needs no data); every error is raised on every rank."""
    group = group_of(mesh.comm)
    with group.together("train: the plan"):
        plan = TrainingPlan.of(config, architecture, mesh.pipe.size, mesh.data.size)
        limits.check_training(config, plan, mesh.pipe.rank, device)
        if config.sample_bytes:
            dtype = arrays.accumulator(arrays.dtype(config.dtype)).name
            limits.check_decoding(plan, mesh.pipe.rank, dtype, PROMPT + config.sample_bytes, mesh.seq.size)
        if mesh.rank == 0:
            output.check_vacant(Path(config.out))
    corpus, placement = None, plan.schedule.placement
    with group.together("train: opening the data"):
        if mesh.pipe.rank in (placement[0], placement[-1]):
            corpus = Corpus.open(config.data, config.seq_len)
    prints = group.gather("train: the data", corpus.fingerprint if corpus else None)
    first = next(rank for rank, found in enumerate(prints) if found is not None)
    others = [rank for rank, found in enumerate(prints) if found not in (None, prints[first])]
    if others:
        error = MismatchError(
            "the ranks see different data: other file names, sizes or contents",
            found=f"other data on rank {', '.join(map(str, others))}",
            expected=f"those of rank {first} on every rank that reads data",
            remedy="give the same files to all hosts, best on a shared file system; the default data differ where "
            "hosts have different Python versions",
        )
        raise_on_all(0, error, group)
    return plan, corpus


def _reporter(config) -> Reporter:
    out = Path(config.out)
    try:
        return Reporter(config.steps, out / "metrics.jsonl", terminal=on_terminal())
    except OSError as error:
        raise output.unusable(out, error) from error


class Trainer:
    """One training under way on this rank.

    Parameters
    ----------
    config : with `out` filled in
    mesh, plan, shard, pipeline : where this rank stands, and what it runs
    corpus : needed on the ranks of the first and the last stage
    reporter : Reporter on rank 0, NullReporter elsewhere
    """

    def __init__(self, config: TrainConfig, mesh, plan: TrainingPlan, shard: Shard, pipeline, corpus, reporter):
        self.config, self.mesh, self.plan, self.shard = config, mesh, plan, shard
        self.pipeline, self.corpus, self.reporter = pipeline, corpus, reporter
        self.optimizer = _optimizer(config, pipeline.stages)
        self.scaler = _scaler(config)
        self.first = mesh.pipe.rank == plan.schedule.placement[0]
        self.last = mesh.pipe.rank == plan.schedule.placement[-1]
        replica = mesh.data.rank
        self.shape = dict(
            batch=config.batch, rows=slice(replica * plan.rows, (replica + 1) * plan.rows), seq_len=config.seq_len
        )
        self.since_record, self.in_all = StepTimes(), StepTimes()

    def run(self) -> Record:
        """Train, validate, show a sample of text, and return the last record."""
        config = self.config
        self._introduce()
        self.reporter.record(Record(0, validation=self.validate()))
        for step in range(config.steps):
            loss, lr, norm = self.step(step)
            done = step + 1
            validated = done % config.eval_every == 0 or done == config.steps
            if validated or done == 1 or done % config.log_every == 0:
                validation = self.validate() if validated else None
                speed = self._speed(self.since_record)
                record = Record(done, loss, validation, lr, norm, **speed, **self._scaling())
                self.reporter.record(record)
                self.since_record = StepTimes()
        model, schedule = self.plan.model, self.plan.schedule
        weights.save(weights.folder_of(config.out), model, self.pipeline.stages, schedule, self.mesh)
        self._show_sample()
        record = replace(record, **self._speed(self.in_all))
        self.reporter.say(
            f"mpipipe: ok steps={record.step} loss={record.loss:.4f} validation={record.validation:.4f} "
            f"tokens/s={record.tokens_per_second:.0f} bubble={record.bubble:.4f} predicted={record.predicted:.4f}"
        )
        return record

    def step(self, step: int):
        """One optimizer step; returns its loss, learning rate and gradient norm, the same on every rank.

        The norm is None where the step was skipped.
        """
        config, start = self.config, perf_counter()
        inputs, targets = self._batch(training_batch, "train", seed=config.seed, step=step)
        result = self.pipeline.step(inputs, targets, scale=self.scaler.scale)
        lr = optim.warmup_cosine(step, config.steps, config.lr, min(config.warmup, config.steps))
        norm = optim.scaled_step(self.optimizer, self.scaler, config.clip, lr=lr, comm=self.mesh.pipe)
        seconds = perf_counter() - start
        for usage in (self.since_record, self.in_all):
            usage.add(seconds, self.pipeline.busy, self.pipeline.elapsed)
        self.reporter.advance()
        return result.loss, lr, norm

    def validate(self) -> float:
        """Mean loss over the validation windows, always the same ones; on every rank."""
        batches = self.config.eval_batches
        losses = [
            self.pipeline.evaluate(*self._batch(validation_batch, "validation", index=index, batches=batches))
            for index in range(batches)
        ]
        return sum(losses) / batches

    def _batch(self, draw, split, **which):
        """(inputs, targets) of this replica and shard, where they belong: on the first and the last stage's rank."""
        if not (self.first or self.last):
            return None, None
        inputs, targets = draw(getattr(self.corpus, split), **which, **self.shape)
        cut = self.shard.cut
        return cut(inputs) if self.first else None, cut(targets) if self.last else None

    def _speed(self, usage: StepTimes) -> dict:
        """Tokens per second and bubble of the steps in `usage`, and the bubble that the stages' durations predict."""
        costs = self.pipeline.durations()
        everyone = group_of(self.mesh.comm).gather("train: the time of all ranks", usage)
        busy, elapsed = sum(each.busy for each in everyone), sum(each.elapsed for each in everyone)
        tokens = usage.steps * self.config.batch * self.config.seq_len
        return {
            "tokens_per_second": tokens / max(each.seconds for each in everyone),
            "bubble": 1 - busy / elapsed,
            "predicted": schedules.simulate(self.plan.schedule, costs).bubble_fraction,
        }

    def _scaling(self) -> dict:
        scaler = self.scaler
        return {"loss_scale": scaler.scale, "skipped": scaler.skipped} if scaler.dynamic else {}

    def _introduce(self):
        config, plan, mesh = self.config, self.plan, self.mesh
        text = "" if self.corpus is None else f", {len(self.corpus.train):,} bytes of text"
        place = "CPUs" if self.pipeline.stages[0].device == "cpu" else "GPUs"
        self.reporter.say(
            f"mpipipe: {mesh.comm.size} ranks = pipe {mesh.pipe.size} x data {mesh.data.size} x seq {mesh.seq.size}; "
            f"{plan.schedule.name}, {plan.schedule.stages} stages, {plan.schedule.microbatches} micro-batches\n"
            f"mpipipe: {plan.model.parameters:,} parameters, {config.dtype} on {place}, batch {config.batch} x "
            f"{config.seq_len} bytes{text}; metrics in {config.out}"
        )

    def _show_sample(self):
        config, plan = self.config, self.plan
        if config.sample_bytes == 0:
            return
        prompt = None
        if self.first:
            text = self.corpus.validation
            prompt = text.read(0, min(PROMPT, len(text))).tobytes()
        root = plan.schedule.placement[0]
        prompt = group_of(self.mesh.pipe).broadcast("train: the prompt of the sample", prompt, root)
        count = config.sample_bytes
        dtype = self.pipeline.stages[0].parameters.flat.dtype.name
        with build_decoder(plan, self.mesh, dtype, len(prompt) + count, self._copy_weights) as decoding:
            answer = generate(decoding, self.mesh, prompt, count, temperature=config.temperature, seed=config.seed)
        title = f"--- sample: {len(prompt)} bytes of validation text, {len(answer)} of the model's"
        self.reporter.say("\n".join([title, readable(prompt + answer), "---"]))

    def _copy_weights(self, stages):
        for stage, trained in zip(stages, self.pipeline.stages):
            for name, values in weights.on_host(trained.parameters).items():
                stage.parameters[name][...] = values


@dataclass
class StepTimes:
    """Time that one rank spent in some steps: seconds in all, and what the pipeline measured."""

    steps: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    elapsed: float = 0.0

    def add(self, seconds: float, busy: float, elapsed: float):
        """Count one more step."""
        self.steps += 1
        self.seconds += seconds
        self.busy += busy
        self.elapsed += elapsed


def _optimizer(config, stages):
    if config.optimizer == "adamw":
        return optim.AdamW(stages, config.lr, weight_decay=config.weight_decay)
    return optim.SGD(stages, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _scaler(config):
    if config.scales_dynamically:
        return optim.LossScaler()
    return optim.LossScaler(config.loss_scale or 1.0, dynamic=False)
