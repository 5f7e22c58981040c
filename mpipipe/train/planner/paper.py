"""Plans and predictions on paper: for ranks that are not there, from what was measured on others."""

from __future__ import annotations

from mpipipe.comm import inprocess
from mpipipe.comm.types import Communicator
from mpipipe.errors import ConfigError
from mpipipe.planning import Choice, Plan, Prediction, Profile, SavedProfile, find_plans, predict
from mpipipe.schedules import Links
from mpipipe.schedules.csv_text import SUFFIX
from mpipipe.train.architecture import Architecture
from mpipipe.train.base import architecture_of, find_base
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import find
from mpipipe.train.dry_run import Forecast, mesh_of
from mpipipe.train.fine_tuning import find_tuning
from mpipipe.train.planner.subject import Subject


def plan_on_paper(
    config: TrainConfig, architecture: Architecture, ranks: int, saved: SavedProfile, links: Links | None
) -> tuple[Subject, list[Plan]]:
    """Find the plans of a training on so many ranks, the fastest first; in one process, without MPI.

    Raises ConfigError where the profile is of another training, or no plan can be.
    """
    subject = inprocess.run(1, lambda comm: _subject(config, architecture, ranks, comm))[0]
    profile = _profile(subject, saved, subject.space.sizes, links)
    return subject, find_plans(profile, subject.space, subject.memory_limit)


def predict_on_paper(found: Forecast, architecture: Architecture, saved: SavedProfile) -> Prediction:
    """Predict the steps of a training of which a dry run was made."""
    config, plan = found.config, found.plan
    if config.schedule.endswith(SUFFIX):
        raise ConfigError(
            "a profile does not predict an order from a file",
            found=f"schedule = {config.schedule}",
            expected="a schedule by its name",
            remedy="leave out --profile, or compare with `mpipipe simulate --csv FILE`",
        )
    ranks = found.pipe * found.data * found.seq
    subject = inprocess.run(1, lambda comm: _subject(config, architecture, ranks, comm))[0]
    counts = tuple(stop - start for start, stop in plan.layer_ranges)
    choice = Choice(
        config.schedule, config.chunks, plan.schedule.microbatches, counts, config.recompute, config.recompute_limit
    )
    profile = _profile(subject, saved, [plan.microbatch_rows], None)
    return predict(profile, choice, subject.rows, subject.space.trained)


def _subject(config: TrainConfig, architecture: Architecture, ranks: int, comm: Communicator) -> Subject:
    config, base = find_base(config, comm)
    tuning = find_tuning(config, comm)
    pipe, data = mesh_of(config, ranks)
    return Subject(
        config, architecture_of(base, architecture), find(config.data, config.vocab).vocab, tuning, pipe, data
    )


def _profile(subject: Subject, saved: SavedProfile, sizes: list[int], links: Links | None) -> Profile:
    if subject.config.device == "cuda":
        raise ConfigError("a profile is of the CPU", found="device cuda", expected="cpu: GPUs are not measured")
    saved.check(subject.facts, subject.signatures)
    return saved.profile(
        subject.ranks,
        subject.signatures,
        sizes,
        states=subject.states,
        trained=subject.trained_counts,
        links=links,
        stride=subject.replicas * subject.config.seq,
    )
