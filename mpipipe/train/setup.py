"""From a configuration to a trainer that runs: the mesh, the data, where to begin, the stages, the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mpipipe import arrays, environment, nn, optim
from mpipipe.attention import kernels
from mpipipe.checkpoint.owner import released_at_end
from mpipipe.comm.mesh import Mesh, select_device
from mpipipe.job import runtime
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.job.watch.watchdog import watching
from mpipipe.language.data import Source
from mpipipe.language.models.fine_tuning import Architecture, FineTuning, find_tuning
from mpipipe.language.models.pretrained import PretrainedModel, architecture_of, find_pretrained, origin_of
from mpipipe.language.packing import Packing
from mpipipe.nn.lora import without_adapters
from mpipipe.pipeline import Pipeline
from mpipipe.planning.find import planned
from mpipipe.planning.subject import Scene
from mpipipe.train import output_folder, provenance, resume, sinks
from mpipipe.train.config import TrainConfig
from mpipipe.train.order_file import with_order
from mpipipe.train.preparation import check_same_config, find_data, make_plan, make_reporter, open_data
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Record, Reporter
from mpipipe.train.survival import Crew
from mpipipe.train.tracing import trace_folder
from mpipipe.train.trainer import Trainer, may_save, preemption_of
from mpipipe.train.training_plan import Shard, TrainingPlan


def train(
    config: TrainConfig, architecture: Architecture, comm: Communicator | None = None, data: Source | None = None
) -> Record:
    """Train a model on bytes or tokens, on all ranks of a communicator; collective.

    Progress goes to the standard output of rank 0, and to metrics.jsonl in `config.out`. That folder must be new or
    empty, unless the training is resumed; a relative path begins in the working folder of rank 0. A standard output
    that is closed and metrics that cannot be written do not end the training. A checkpoint that cannot be written does,
    unless `config.on_storage_error` says otherwise.

    Parameters
    ----------
    config : TrainConfig
        The same on every rank.
    architecture : callable
        Makes the model from the sizes in `config`, such as `models.GPT`.
    comm : communicator, optional
        The ranks, COMM_WORLD by default. It is duplicated.
    data : Source, optional
        What to read in place of `config.data`; the same on every rank. See `mpipipe.language.data.Source`.

    Returns
    -------
    Record
        The state at the end of the training. Its speed and bubble are those of all steps since it was started.

    Raises
    ------
    ConfigError, DataError, MismatchError, ArgumentError
        On every rank, before anything is written.
    OwnerError
        On every rank: another job owns the folder, or has taken it from this one. See docs/checkpoints.md.
    BackendError
        On every rank, where the device is missing.
    StorageError
        On every rank, where a checkpoint cannot be written.
    NonFiniteError, ReplicaError
        Where the loss is NaN or infinite, or a gradient is and no smaller loss scale can help. Where replicas differ.
    SystemExit
        On every rank, with the code 75: a signal has come, or the time is over, and a checkpoint is saved.

    Examples
    --------
    >>> import tempfile
    >>> from mpipipe.job import inprocess
    >>> from mpipipe.language.models import GPT
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
    with group_of(comm).raise_together("train: where metrics go"):
        if comm.rank == 0:
            sinks.check_installed(sinks.parse_names(config.metrics_to))
    config, base = find_pretrained(config, comm)
    tuning = find_tuning(config, comm)
    architecture = architecture_of(base, architecture)
    owned = output_folder.own(comm, config.out)
    with released_at_end(owned, None if config.survive else group_of(comm)):
        return _train_owned(comm, config, architecture, base, data, out=owned.folder, tuning=tuning)


def _train_owned(
    comm: Communicator,
    config: TrainConfig,
    architecture: Architecture,
    base: PretrainedModel | None,
    data: Source | None,
    *,
    out: Path,
    tuning: FineTuning,
) -> Record:
    config = with_order(config, comm, out)
    trace = trace_folder(comm, config.trace, out, resumes=config.resume != "no")
    pipe = max(1, comm.size // config.seq) if config.pipe is None else config.pipe
    if config.survive:
        crew = Crew(config, comm, pipe, out)
        with watching(config.watchdog, out):
            return crew.train(
                lambda mesh: _train_in(
                    mesh, config, architecture, base, data, out=out, trace=trace, tuning=tuning, crew=crew
                )
            )
    with group_of(comm).raise_together("train: the mesh"):
        mesh = Mesh(comm, pipe=pipe, seq=config.seq)
    with watching(config.watchdog, out), mesh:
        return _train_in(mesh, config, architecture, base, data, out=out, trace=trace, tuning=tuning)


def _load_weights(
    config: TrainConfig,
    plan: TrainingPlan,
    base: PretrainedModel | None,
    tuning: FineTuning,
    stages: Sequence[nn.Stage],
    mesh: Mesh,
) -> None:
    """Load the weights from which a new training begins, if it begins from any; collective."""
    if config.init is not None:
        resume.load_weights(config.init, mesh, without_adapters(stages, merged=False), plan.model)
    elif base is not None:
        base.folder.load(without_adapters(stages, merged=False), mesh)
    tuning.load(stages, plan.model, origin_of(config, base), mesh)


def _reporter(
    config: TrainConfig,
    plan: TrainingPlan,
    mesh: Mesh,
    device: str,
    make: Callable[[str | None], Reporter],
    given: str | None,
) -> Reporter | NullReporter:
    """Make the reporter, and write down what the training depends on; collective.

    `make` is called on rank 0, with a sentence if ranks share cores. For `given` see `provenance.write`.
    """
    surroundings = environment.gather(mesh.comm, gpus=device != "cpu")
    with group_of(mesh.comm).raise_together("train: the reporter"):
        if surroundings is None:  # not on rank 0
            return NullReporter()
        reporter = make(surroundings["oversubscribed"])
        provenance.describe(reporter, config, plan, surroundings, device=device, pipe=mesh.pipe.size, given=given)
        return reporter


def _train_in(
    mesh: Mesh,
    config: TrainConfig,
    model: Architecture,
    base: PretrainedModel | None,
    data: Source | None,
    *,
    out: Path,
    trace: Path | None,
    tuning: FineTuning,
    crew: Crew | None = None,
) -> Record:
    device = select_device(config.device, mesh.comm)
    if crew is not None:
        crew.check_device(device)
    with arrays.own_stream(device):
        return _train_on(device, config, model, base, mesh, data, out=out, trace=trace, tuning=tuning, crew=crew)


def _train_on(
    device: str,
    config: TrainConfig,
    model: Architecture,
    base: PretrainedModel | None,
    mesh: Mesh,
    data: Source | None,
    *,
    out: Path,
    trace: Path | None,
    tuning: FineTuning,
    crew: Crew | None,
) -> Record:
    survivor = crew if crew is not None and crew.goes_on else None  # has the state of the training in memory
    group = group_of(mesh.comm)
    found = find_data(config, data, group)
    chosen = ""
    if config.plan == "auto":
        config, chosen = planned(Scene.of(config, model, mesh, found.vocab, tuning), device)
    plan = make_plan(config, model, base, mesh, device, found.vocab, tuning)
    source, language = open_data(config, plan, mesh, found, base)
    start = None if survivor else resume.find_start(config, plan, mesh, out, found.fingerprint)
    with group.raise_together("train: the shards of sequences"):
        packing = Packing(plan.schedule.microbatches) if config.packing == "segments" else None
        shard = Shard(mesh.seq, config.layout, config.seq_len, packing)
    with group.raise_together("train: the stages"):
        kernels.check_choice(device)
        stages = plan.stages(mesh.pipe.rank, shard, config.dtype, config.seed, device)
        loss = shard.loss_for(stages[-1], plan.microbatch_rows)
    with (
        Pipeline(
            stages, plan.schedule, mesh.pipe, loss=loss, recompute=config.recompute, replicas=mesh.replicas
        ) as pipeline,
        optim.GlobalNorm(stages, mesh.pipe, replicas=mesh.replicas) as norm,
    ):
        progress = Progress(config, pipeline, mesh)
        if survivor:
            survivor.restore(progress)
        elif start is not None:
            progress.load(start)
        else:
            _load_weights(config, plan, base, tuning, stages, mesh)
        output_folder.make_folder(out, mesh.comm, writes=mesh.replicas.rank == 0 or may_save(config))
        make = survivor.reporter if survivor else partial(make_reporter, config, out, start)
        given = None if data is None else found.fingerprint
        reporter = _reporter(config, plan, mesh, device, partial(make, language.unit), given)
        with reporter, preemption_of(config, mesh, reporter) as preemption:
            trainer = Trainer(
                config,
                mesh,
                plan,
                shard,
                progress,
                preemption,
                norm=norm,
                data=source,
                language=language,
                reporter=reporter,
                out=out,
                base=base,
                trace=None if survivor else trace,
            )
            trainer.facts = resume.facts_of(config, plan, found.fingerprint)
            if crew is not None:
                crew.enlist(trainer)
            preemption.whereabouts = trainer.whereabouts
            if chosen:
                reporter.say(chosen)
            with trainer.checkpoints, told(trainer.whereabouts):
                return trainer.run()


# -- Ctrl-C: whoever stops a training is told how far it had come -----------------------------------------------------


@contextmanager
def told(whereabouts: Callable[[], str]) -> Iterator[None]:
    """Give a KeyboardInterrupt within the text of `whereabouts()`, for the report of the job's end.

    Parameters
    ----------
    whereabouts : returns a line or more; called once, after the interrupt
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if not error.args:
            error.args = (whereabouts(),)
        raise
