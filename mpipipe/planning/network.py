"""What a step takes where ranks share network cards (NICs), with each order of the mesh's axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter

from mpipipe.comm import ORDER, Coordinates, rank_at
from mpipipe.errors import ArgumentError
from mpipipe.planning.predict import Plan
from mpipipe.planning.problem import PlanningProblem
from mpipipe.schedules import Costs, Links, Schedule, simulate_flows

# 200 Gbit/s between nodes, and of ranks that are not there eight on a node.
NIC = "5e-6,25e9,{node_size},2e-6,200e9"
PAPER = 8
ORDERS = {ORDER: "replicas of a stage", "data,pipe,seq": "stages of a pipeline"}
BEST = 20  # plans that are ranked once more


def read_links(nics_per_node: int, nic: str | None, node_size: int = PAPER) -> Links:
    """Return links of nodes with this number of NICs, from a text as for `Links.read`.

    What it leaves out is that of `NIC`. Raises ArgumentError where ranks do not share NICs evenly.
    """
    given = nic.split(",") if nic else []
    others = NIC.format(node_size=node_size).split(",")[len(given) :]
    links = Links.read(",".join([*given, *others]))
    nic_ranks, rest = divmod(links.node_size, nics_per_node)
    if nic_ranks and rest:
        raise ArgumentError(
            "the ranks of a node do not share its network cards evenly",
            found=f"{links.node_size} ranks, {nics_per_node} cards",
            expected="a divisor of the ranks, or a card for each",
        )
    return replace(links, nic_ranks=max(1, nic_ranks))


def seconds_of_orders(
    schedule: Schedule,
    costs: Costs,
    links: Links,
    shape: Coordinates,
    orders: Iterable[str] = ORDERS,
) -> dict[str, float]:
    """Return what a step takes, for each order of the axes of a mesh of this shape."""
    seconds = {}
    for order in orders:
        pipelines = []
        for data, seq in product(range(shape.data), range(shape.seq)):
            places = [Coordinates(pipe, data, seq) for pipe in range(shape.pipe)]
            pipelines.append([rank_at(place, shape, order) for place in places])
        seconds[order] = simulate_flows(schedule, costs, links, pipelines)
    return seconds


def ranked(
    problem: PlanningProblem, plans: Sequence[Plan], links: Links, orders: Iterable[str]
) -> list[Plan]:
    """Rank the best plans by their steps on these links, each with its best order of the axes."""
    alone = replace(links, nic_ranks=1)
    best = []
    for plan in plans[:BEST]:
        gradients = problem.gradient_bytes(plan.choice.ranges)
        costs = replace(plan.costs, gradient_bytes=gradients)
        seconds = seconds_of_orders(plan.schedule, costs, links, problem.shape, orders)
        order = min(seconds, key=seconds.__getitem__)
        plain = seconds_of_orders(plan.schedule, costs, alone, problem.shape, [order])
        waits = max(0.0, seconds[order] - plain[order])
        best.append(replace(plan, order=order, seconds=plan.seconds + waits))
    best.sort(key=attrgetter("seconds"))
    return [*best, *plans[BEST:]]
