"""What the ranks of a training agree on before it begins: the configuration, the plan, and the data."""

from __future__ import annotations

from pathlib import Path

from mpipipe import arrays
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import rank_list
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import MismatchError
from mpipipe.train import memory, metrics, output, resume
from mpipipe.train.architecture import Architecture
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Corpus, Listing
from mpipipe.train.fingerprint import glance
from mpipipe.train.report import Reporter, on_terminal
from mpipipe.train.training_plan import TrainingPlan

PROMPT_BYTES = 32  # of validation text, which the sample at the end of a training continues


def check_same_config(group: Group, config: TrainConfig) -> None:
    """Raise MismatchError on all ranks where they have different configurations."""
    group.agree(
        "train: the configuration",
        tuple((f"{key} =", repr(value)) for key, value in vars(config).items()),
        message="the ranks have different configurations",
        remedy="give the same file and flags to all ranks",
    )


def make_plan(config: TrainConfig, architecture: Architecture, mesh: Mesh, device: str) -> TrainingPlan:
    """Plan the training, and check that it fits into memory. All ranks raise the same error."""
    with group_of(mesh.comm).together("train: the plan"):
        plan = TrainingPlan.of(config, architecture, mesh.pipe.size, mesh.data.size)
        memory.check_training(config, plan, mesh.pipe.rank, device)
        if config.sample_bytes:
            dtype = arrays.accumulator(arrays.dtype(config.dtype)).name
            memory.check_decoding(plan, mesh.pipe.rank, dtype, PROMPT_BYTES + config.sample_bytes, mesh.seq.size)
    return plan


def open_corpus(config: TrainConfig, plan: TrainingPlan, mesh: Mesh) -> tuple[Corpus | None, str]:
    """Open the data on the ranks of the first and the last stage; return them, and on every rank their fingerprint.

    All ranks raise the same error. Rank 0 alone lists the files and looks into all of them: a file system that
    thousands of ranks share is slow. The others learn of it, and see for themselves that a few of the files are the
    same.
    """
    group, placement = group_of(mesh.comm), plan.schedule.placement
    listing = corpus = seen = None
    with group.together("train: listing the data"):
        if mesh.rank == 0:
            listing = Listing.of(config.data)
    listing = group.broadcast("train: the list of data", listing)
    with group.together("train: opening the data"):
        if mesh.pipe.rank in (placement[0], placement[-1]):
            corpus = Corpus.of(listing, config.data, config.seq_len)
        if mesh.rank == 0 or corpus is not None:
            seen = glance(listing.found(config.data))
    all_seen = group.gather("train: the data", seen)
    others = [rank for rank, found in enumerate(all_seen) if found not in (None, all_seen[0])]
    if others:
        error = MismatchError(
            "the ranks see different data: other sizes or contents of files",
            found=f"other data on {rank_list.named(others)}",
            expected="those of rank 0 on every rank that reads data",
            remedy="give the same files to all hosts, best on a shared file system; the default data differ where "
            "hosts have different Python versions",
        )
        raise_on_all(0, error, group)
    return corpus, listing.fingerprint


def make_reporter(config: TrainConfig, out: Path, start: Checkpoint | None) -> Reporter:
    """Make the reporter of rank 0, with metrics that go on behind the checkpoint `start`, if there is one."""
    step = 0 if start is None else start.step
    try:
        aside = resume.leave_behind(start, out)
        metrics.cut(out, step)
        goes_on = None if config.resume == "no" else step
        reporter = Reporter(config.steps, out / metrics.NAME, terminal=on_terminal(), done=goes_on)
    except OSError as error:
        raise output.unusable(out, error) from error
    for path in aside:
        reporter.say(f"mpipipe: a checkpoint behind the one that is resumed is now called {path}")
    return reporter
