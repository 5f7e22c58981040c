"""Finds the plan of a training: measures, searches, and compares with some real steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.language.data import find
from mpipipe.language.models.fine_tuning import Architecture, find_tuning
from mpipipe.language.models.pretrained import architecture_of, find_pretrained
from mpipipe.planning import Choice, Plan, Prediction, Profile, SavedProfile, find_plans, predict
from mpipipe.planning.dry_run import Forecast, mesh_of
from mpipipe.planning.links import measure_action, measure_links, measure_step, rehearsal
from mpipipe.planning.probe import Measured, measure_layers
from mpipipe.planning.subject import Scene, Subject
from mpipipe.planning.table import in_words
from mpipipe.schedules import Links
from mpipipe.schedules.csv_text import SUFFIX
from mpipipe.train.config import TrainConfig

REAL = 3  # plans of which real steps are made
STEPS = 5  # real steps of each


@dataclass(frozen=True)
class Found:
    """The plans of a training.

    Attributes
    ----------
    plans : the fastest first; on rank 0, elsewhere empty
    choice : of the first one; on every rank
    profile : what was measured
    oversubscribed : which ranks share cores; "" where none do
    """

    plans: Sequence[Plan]
    choice: Choice
    profile: Profile
    oversubscribed: str


def find_plan(scene: Scene, place: str) -> Found:
    """Find the plans of a training; collective over all ranks. Raises the same error on every rank."""
    group = group_of(scene.mesh.comm)
    with group.raise_together("plan: what is asked for"):
        scene.check_place(place)
        space = scene.space
    oversubscribed = scene.oversubscribed()
    profile = measure(scene)
    plans: list[Plan] = []
    with group.raise_together("plan: the search"):
        if group.rank == 0:
            plans = find_plans(profile, space, scene.memory_limit)
    tried = group.broadcast("plan: what is compared with real steps", _different(plans))
    measured = []
    for choice in tried:
        with rehearsal(scene, choice) as rehearsed:
            measured.append(median(rehearsed.steps(STEPS)))
    if group.rank == 0:
        predicted = {plan.choice: plan.prediction.seconds for plan in plans}
        scales = [
            max(1e-9, seconds - profile.step) / max(1e-9, predicted[choice] - profile.step)
            for choice, seconds in zip(tried, measured)
        ]
        profile = replace(profile, scale=median(scales))
        plans = [_scaled(plan, profile) for plan in plans]
    return Found(plans, tried[0], group.broadcast("plan: the measurements", profile), oversubscribed)


def planned(scene: Scene, place: str) -> tuple[TrainConfig, str]:
    """Return the configuration with the best plan, and in a line what it is; collective over all ranks."""
    found = find_plan(scene, place)
    line = ""
    if found.plans:
        rough = f" ({found.oversubscribed})" if found.oversubscribed else ""
        line = f"mpipipe: plan: {in_words(found.plans[0])}{rough}"
    return scene.planned(found.choice), line


def measure(scene: Scene) -> Profile:
    """Measure layers, messages and steps; collective over all ranks."""
    action = measure_action(scene)
    links = measure_links(scene, action)
    step = measure_step(scene, action, links)
    mine = measure_layers(scene)
    costs = {size: replace(each, action=each.action + action) for size, each in mine.costs.items()}
    everyone = group_of(scene.mesh.comm).gather(
        "plan: what all ranks have measured", (scene.mesh.pipe.rank, replace(mine, costs=costs), step)
    )
    slowest: dict[int, Measured] = {}
    for rank, each, _ in everyone:  # of the replicas, which wait for each other
        if rank not in slowest or _total(each) > _total(slowest[rank]):
            slowest[rank] = each
    ranks = [slowest[rank] for rank in range(scene.mesh.pipe.size)]
    return Profile(
        kinds=scene.kinds,
        costs={size: tuple(each.costs[size] for each in ranks) for size in costs},
        links=links,
        sizes=mine.sizes,
        states=scene.states,
        trained=scene.trained_counts,
        optimizer=tuple(each.optimizer for each in ranks),
        sums=tuple(each.sums for each in ranks),
        step=max(step for _, _, step in everyone),
        alone=mine.alone,
    )


def _total(measured: Measured) -> float:
    return sum(layer.forward + layer.backward for each in measured.costs.values() for layer in each.layers)


def _different(plans: Sequence[Plan]) -> list[Choice]:
    """Return the best plan, the best one with other micro-batches, and the best one with another schedule."""
    if not plans:
        return []
    best = plans[0].choice
    tried = [best]
    for same in (lambda each: each.microbatches, lambda each: (each.schedule, each.chunks)):
        other = next((p.choice for p in plans if p.choice not in tried and same(p.choice) != same(best)), None)
        if other is not None:
            tried.append(other)
    return tried[:REAL]


def _scaled(plan: Plan, profile: Profile) -> Plan:
    found = plan.prediction
    seconds = profile.step + profile.scale * (found.seconds - profile.step)
    return replace(plan, prediction=replace(found, seconds=seconds))


# -- Plans and predictions on paper: for ranks that are not there, from what was measured on others -------------------


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
    config, base = find_pretrained(config, comm)
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
