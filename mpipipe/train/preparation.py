"""What the ranks of a training agree on before it begins: the configuration, the plan, and the data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mpipipe import arrays
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import rank_list
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError, MismatchError
from mpipipe.train import memory, metrics, output_folder, resume
from mpipipe.train.architecture import Architecture
from mpipipe.train.base import Base
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Found, Given, Source, find
from mpipipe.train.data.fingerprint import glance
from mpipipe.train.fine_tuning import FineTuning
from mpipipe.train.language import BytesPerToken, Language, find_tokenizer
from mpipipe.train.report import Reporter
from mpipipe.train.result import check_can_leave
from mpipipe.train.training_plan import TrainingPlan

DIFFERENT = "the ranks see different data: other sizes or contents of files"
PROMPT_BYTES = 32  # of validation text, which the sample at the end of a training continues


def check_same_config(group: Group, config: TrainConfig) -> None:
    """Raise MismatchError on all ranks where they have different configurations."""
    group.agree(
        "train: the configuration",
        tuple((f"{key} =", repr(value)) for key, value in vars(config).items()),
        message="the ranks have different configurations",
        remedy="give the same file and flags to all ranks",
    )


def make_plan(
    config: TrainConfig,
    architecture: Architecture,
    base: Base | None,
    mesh: Mesh,
    device: str,
    vocab: int,
    tuning: FineTuning,
) -> TrainingPlan:
    """Plan the training, and check that it fits into memory and that its end can be written.

    All ranks raise the same error.
    """
    with group_of(mesh.comm).together("train: the plan"):
        plan = TrainingPlan.of(config, architecture, mesh.pipe.size, mesh.data.size, vocab, tuning)
        memory.check_training(config, plan, mesh.pipe.rank, device)
        check_can_leave(config, plan, base)
        if config.packing == "segments" and asdict(plan.model).get("positions") == "learned":
            raise ConfigError(
                "documents cannot be packed for a model with learned positions, which begin with the sequence",
                found="packing = segments",
                expected="a model with rotary positions, to which only distances count",
                remedy="leave packing out",
            )
        if config.sample_bytes:
            dtype = arrays.accumulator(arrays.dtype(config.dtype)).name
            memory.check_decoding(plan, mesh.pipe.rank, dtype, (1, PROMPT_BYTES + config.sample_bytes), mesh.seq.size)
    return plan


def find_data(config: TrainConfig, given: Source | None, group: Group) -> Found:
    """Return what the data are, on every rank: those of `config.data`, or a source of the user's own.

    All ranks raise the same error. Rank 0 alone lists files and looks into all of them: a file system that thousands
    of ranks share is slow.
    """
    found = None
    with group.together("train: the data"):
        if given is not None and config.data:
            raise ConfigError(
                "the data are given twice",
                found=f"data = {', '.join(config.data)}, and a source of your own",
                remedy="leave one of them out",
            )
        if given is None and group.rank == 0:
            found = find(config.data, config.vocab)
    if given is None:
        return group.broadcast("train: the list of data", found)
    facts = tuple((name, getattr(given, name)) for name in ("vocab", "fingerprint", "unit", "tokenizer"))
    lengths = ("tokens", (len(given.train), len(given.validation)))
    group.agree("train: the source of data", (*facts, lengths), message=DIFFERENT, remedy="give all ranks the same")
    return Given(given)


def open_data(
    config: TrainConfig, plan: TrainingPlan, mesh: Mesh, found: Found, base: Base | None
) -> tuple[Source | None, Language]:
    """Open the data. Return them on the ranks that read them, None on the others, and on all ranks what they are.

    The ranks of the first and of the last stage read data; all ranks do if attention stays within documents. A rank
    that reads checks that a few of its files are the files that rank 0 has listed. All ranks raise the same error.
    """
    placement = plan.schedule.placement
    reads = mesh.pipe.rank in (placement[0], placement[-1]) or config.packing == "segments"
    tokenizer = None
    source = seen = None
    group = group_of(mesh.comm)
    with group.together("train: opening the data"):
        if reads:
            source = found.open(config.data, config.seq_len)
        if mesh.rank == 0 or reads:
            seen = glance(found.found(config.data))
        if mesh.rank == 0:
            tokenizer = find_tokenizer(found, config.tokenizer, None if base is None else base.folder.path)
    ratios = BytesPerToken() if source is None else BytesPerToken.of(source)
    everyone = group.gather("train: the data", (seen, ratios))
    all_seen = [each for each, _ in everyone]
    others = [rank for rank, other in enumerate(all_seen) if other not in (None, all_seen[0])]
    if others:
        error = MismatchError(
            DIFFERENT,
            found=f"other data on {rank_list.named(others)}",
            expected="those of rank 0 on every rank that reads data",
            remedy="give the same files to all hosts, best on a shared file system; the default data differ where "
            "hosts have different Python versions",
        )
        raise_on_all(0, error, group)
    known = next((each for _, each in everyone if each.train is not None), ratios)
    return source, Language(found.vocab, found.unit, known, tokenizer)


def make_reporter(
    config: TrainConfig, out: Path, start: Checkpoint | None, unit: str, oversubscribed: str | None
) -> Reporter:
    """Make the reporter of rank 0, with metrics that go on behind the checkpoint `start`, if there is one.

    For `unit` and `oversubscribed` see Reporter.
    """
    step = 0 if start is None else start.step
    try:
        aside = resume.leave_behind(start, out)
        metrics.cut(out, step)
        goes_on = None if config.resume == "no" else step
        reporter = Reporter(config.steps, out, unit=unit, oversubscribed=oversubscribed, done=goes_on)
    except OSError as error:
        raise output_folder.unusable(out, error) from error
    for path in aside:
        reporter.say(f"mpipipe: a checkpoint behind the one that is resumed is now called {path}")
    return reporter
