"""Finds the plan of a training: measures, searches, and compares with real steps."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mpipipe import processor
from mpipipe.errors import ConfigError
from mpipipe.job import RankGroup, group_of, oversubscribed, own_cores
from mpipipe.planning.links import trial_seconds
from mpipipe.planning.network import ORDERS, ranked, read_links
from mpipipe.planning.predict import Plan, predict
from mpipipe.planning.probe import measure
from mpipipe.planning.problem import MeasuredRanks
from mpipipe.planning.profile import Profile
from mpipipe.planning.search import find_plans
from mpipipe.schedules import Links

TRIED = 3  # plans whose real steps are measured


@dataclass(frozen=True)
class PlanReport:
    """The plans of a training: all of them on rank 0, the fastest on every rank.

    `links` are those whose network cards ranks share, if they were given. The last field says
    which ranks share cores.
    """

    plans: Sequence[Plan]
    best: Plan
    links: Links | None
    profile: Profile
    oversubscribed: str


def find_plan(
    measured: MeasuredRanks,
    place: str,
    nics_per_node: int | None = None,
    nic: str | None = None,
    orders: Iterable[str] = ORDERS,
) -> PlanReport:
    """Find the plans of a training; collective. All ranks raise the same error.

    With `nics_per_node` the best are ranked once more, by links that are read from `nic`, with the
    best of these orders of the mesh's axes.
    """
    problem = measured.problem
    group = group_of(measured.mesh.comm)
    with group.raise_together("plan: what is asked for"):
        if place != "cpu":
            # On a GPU the host's clock says nothing of a layer.
            raise ConfigError(
                "a plan is made on the CPU only",
                found=f"device {place}",
                remedy="choose schedule, chunks and microbatches by hand, with --device cpu make "
                "a plan of the CPU's",
            )
        space = problem.space
    node_size, shared_cores = _places(group)
    links = None
    if nics_per_node is not None:
        with group.raise_together("plan: the network cards"):
            links = read_links(nics_per_node, nic, node_size)
    profile = measure(measured)
    plans: list[Plan] = []
    with group.raise_together("plan: the search"):
        if group.rank == 0:
            plans = find_plans(profile, space, problem.memory_limit)
    tried = group.broadcast(
        "plan: what is compared with real steps", [plan.choice for plan in plans[:TRIED]]
    )
    scales = []
    for choice in tried:
        # Sequences are whole, as they are measured.
        whole = replace(choice, slices=1)
        seconds = trial_seconds(measured, whole)
        if group.rank == 0:
            expected = predict(profile, whole, problem.rows, problem.trained_layers).seconds
            scales.append(seconds / max(1e-9, expected))
    result = None
    if group.rank == 0:
        profile = replace(profile, scale=median(scales))
        plans = [replace(plan, seconds=profile.scale * plan.seconds) for plan in plans]
        if links is not None:
            plans = ranked(problem, plans, links, orders)
        result = plans[0], profile
    best, profile = group.broadcast("plan: the result", result)
    return PlanReport(plans, best, links, profile, shared_cores)


def _places(group: RankGroup) -> tuple[int, str]:
    """Return the most ranks on a node, and which ranks share cores; collective."""
    place_here = {
        "rank": group.rank,
        "host": socket.gethostname(),
        "cores": own_cores(),
        "threads": processor.thread_count(),
    }
    places = group.gather("plan: the cores", place_here)
    text = oversubscribed(places) or ""
    if text:
        text += ": times depend on who waits meanwhile, and predictions are rough"
    return max(Counter(place["host"] for place in places).values()), text
