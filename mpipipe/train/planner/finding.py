"""Finds the plan of a training: measures, searches, and compares with some real steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from mpipipe.comm.group import group_of
from mpipipe.planning import Choice, Plan, Profile, find_plans
from mpipipe.planning.table import in_words
from mpipipe.train.config import TrainConfig
from mpipipe.train.planner.layers import Measured, measure_layers
from mpipipe.train.planner.links import measure_action, measure_links, measure_step
from mpipipe.train.planner.rehearsal import rehearsal
from mpipipe.train.planner.scene import Scene

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


def find(scene: Scene, place: str) -> Found:
    """Find the plans of a training; collective over all ranks. Raises the same error on every rank."""
    group = group_of(scene.mesh.comm)
    with group.together("plan: what is asked for"):
        scene.check_place(place)
        space = scene.space
    oversubscribed = scene.oversubscribed()
    profile = measure(scene)
    plans: list[Plan] = []
    with group.together("plan: the search"):
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
    found = find(scene, place)
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
