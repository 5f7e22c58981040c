"""How ranks and threads share the cores of a node: what threads gain a rank is measured, the rest is predicted.

While ranks have a number of threads, as many of them compute as a node has cores for, and the others wait. So ranks
share the bandwidth of the memory while they are measured, as in a training. On a node of four cores with four ranks:

    1 thread       2 threads      4 threads
    r0 r1 r2 r3    r0 r0 r1 r1    r0 r0 r0 r0
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, TypeAlias

from mpipipe import processor
from mpipipe.errors import MpipipeError
from mpipipe.job import cores_of, fair_shares, group_of, own_cores, parse_cores
from mpipipe.planning.find import PlanReport, profile_of, shown_seconds
from mpipipe.planning.probe import measure_threads
from mpipipe.planning.problem import MeasuredRanks, PlanningProblem
from mpipipe.planning.profile import Profile
from mpipipe.planning.saved import SavedProfile, combined
from mpipipe.planning.search import Plan, find_plans
from mpipipe.text import counted, shown_bytes, text_table

# for each number of threads, and each size of micro-batch: seconds of a step, and of the optimizer for one parameter
ThreadTimes: TypeAlias = "Mapping[int, Sequence[tuple[float, float]]]"

NEAR = 0.03  # of a step: among placements so near to the fastest the one with the fewest ranks takes the least memory


class RankPlace(NamedTuple):
    """Where a rank is: its host, the cores that it may run on, and the ring of ranks that compute together."""

    host: str
    cores: Collection[int]
    ring: int


@dataclass(frozen=True)
class Placement:
    """So many ranks on each node, with so many threads each.

    `speed` is that of a rank, as a multiple of what it is with one thread. `plan` is the fastest one, None where there
    is none.
    """

    ranks: int
    threads: int
    speed: float
    plan: Plan | None


@dataclass(frozen=True)
class PlacementReport:
    """Placements on nodes with so many cores, on rank 0, and which one the measured ranks have; or why there are none."""

    cores: int
    placements: Sequence[Placement] = ()
    present: tuple[int, int] = (1, 1)
    reason: str = ""

    def best(self) -> Placement | None:
        """Return the placement with the fewest ranks among those with nearly the fastest step."""
        known = [(each, each.plan.prediction.seconds) for each in self.placements if each.plan is not None]
        limit = (1 + NEAR) * min((seconds for _, seconds in known), default=0.0)
        return min((each for each, seconds in known if seconds <= limit), key=lambda each: each.ranks, default=None)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table, and what is proposed."""
        if self.reason:
            yield f"ranks and threads were not compared: {self.reason}"
            return
        heads = ("ranks on a node", "threads", "speed of a rank", "step", "memory of a node")
        yield from text_table(heads, [_row(each) for each in self.placements], left=())
        best = self.best()
        if best is not None:
            yield (
                f"on {counted(self.cores, 'core')} of a node: {counted(best.ranks, 'rank')} with "
                f"{counted(best.threads, 'thread')} each (the fewest ranks within {NEAR:.0%} of the fastest step)"
            )
            if (best.ranks, best.threads) != self.present:
                yield "start those and plan again: messages and sums that the ranks here do not have are not counted"


def _row(placement: Placement) -> tuple[str, ...]:
    shown = ("no plan", "-")
    if (plan := placement.plan) is not None:
        shown = shown_seconds(plan.prediction.seconds), shown_bytes(placement.ranks * plan.prediction.peak)
    return str(placement.ranks), str(placement.threads), f"{placement.speed:.2f}", *shown


def find_placements(measured: MeasuredRanks, found: PlanReport, pipe: int | None) -> PlacementReport:
    """Compare numbers of ranks and threads for the cores of a node, after `find_plan`; collective over all ranks.

    `pipe` is the number of ranks of a pipeline where that is given; else all ranks make one pipeline.
    """
    mesh, group = measured.mesh, group_of(measured.mesh.comm)
    ring = mesh.data.rank * mesh.pipe.size + mesh.pipe.rank
    mine = RankPlace(socket.gethostname(), sorted(cores_of(parse_cores(own_cores()))), ring)
    places = group.gather("plan: the cores of all ranks", mine)
    most, chosen = min(len(place.cores) for place in places), processor.chosen_threads()
    if chosen is not None:
        remedy = f"unset {processor.VARIABLE}, OMP_NUM_THREADS and its kin to compare them"
        return PlacementReport(most, reason=f"a variable sets {counted(chosen, 'thread')}; {remedy}")
    if most < 2:
        return PlacementReport(most, reason="a rank may run on one core alone, and has one thread")
    if found.oversubscribed:
        return PlacementReport(most, reason="ranks share cores; start at most one for each core")
    cores = host_cores(places)
    base = min(fair_shares([(place.host, place.cores) for place in places]))  # with which the plan was measured
    at_work = {count: rings_at_work(places, count) for count in thread_counts(most, base)}
    times = measure_threads(measured, {count: ring in rings for count, rings in at_work.items() if rings})
    everyone = group.gather("plan: what threads gain", times)
    placements: list[Placement] = []
    with group.raise_together("plan: ranks and threads"):
        if group.rank == 0:
            counts = sorted(set().union(*everyone))
            means = {count: combined(fmean, *(each[count] for each in everyone if count in each)) for count in counts}
            placements = [*compared(measured.problem, found.profile, means, base, len(cores), min(cores.values()), pipe)]
    return PlacementReport(min(cores.values()), placements, (len(places) // len(cores), base))


def host_cores(places: Sequence[RankPlace]) -> dict[str, int]:
    """Return how many cores of each host the ranks may run on."""
    hosts = dict.fromkeys(place.host for place in places)
    return {host: len({core for place in places if place.host == host for core in place.cores}) for host in hosts}


def thread_counts(most: int, base: int) -> list[int]:
    """Return the numbers of threads to try: powers of two up to `most`, that one, and `base`."""
    return sorted({base, most, *(1 << power for power in range(most.bit_length()))})


def rings_at_work(places: Sequence[RankPlace], threads: int) -> set[int]:
    """Return the rings whose ranks compute while each has so many threads: on each host as many as have room."""
    cores, before, idle = host_cores(places), Counter[str](), set()
    for place in places:
        before[place.host] += 1
        if before[place.host] * threads > cores[place.host]:
            idle.add(place.ring)
    return {place.ring for place in places} - idle


def compared(
    problem: PlanningProblem, profile: Profile, times: ThreadTimes, base: int, nodes: int, cores: int, pipe: int | None
) -> Iterator[Placement]:
    """Yield for each number of threads as many ranks as fit a node, and their plan; `profile` is of `base` threads."""
    for threads, own in times.items():
        ranks = most_ranks(problem, nodes, cores // threads, pipe)
        if not ranks:
            continue
        pipeline = pipe or nodes * ranks // problem.seq
        other = replace(problem, ranks=pipeline, replicas=nodes * ranks // (pipeline * problem.seq))
        shares = [(step / first, update / early) for (step, update), (first, early) in zip(own, times[base])]
        saved = SavedProfile.of(_scaled(profile, dict(zip(problem.space.sizes, shares))), problem.signatures, problem.facts)
        try:
            space = other.space
            plan = find_plans(profile_of(other, saved, space.sizes), space, other.memory_limit)[0]
        except MpipipeError:  # what is fixed, or the limit of memory, does not fit so many ranks
            plan = None
        yield Placement(ranks, threads, sum(step for step, _ in times[1]) / sum(step for step, _ in own), plan)


def _scaled(profile: Profile, shares: Mapping[int, tuple[float, float]]) -> Profile:
    """Return a profile of ranks whose actions and optimizer take a share of the time, one for each size."""
    costs = {
        size: combined(lambda numbers, share=shares[size][0]: share * numbers[0], of_ranks)
        for size, of_ranks in profile.costs.items()
    }
    update = fmean(share for _, share in shares.values())
    return replace(profile, costs=costs, optimizer=tuple(update * seconds for seconds in profile.optimizer))


def most_ranks(problem: PlanningProblem, nodes: int, most: int, pipe: int | None) -> int:
    """Return how many ranks each node can have, up to `most`, so that they make a mesh for the batch; 0 if none can."""
    for ranks in range(most, 0, -1):
        pipeline = pipe or nodes * ranks // problem.seq
        if not 1 <= pipeline <= len(problem.layers):
            continue
        replicas, rest = divmod(nodes * ranks, pipeline * problem.seq)
        if replicas and not rest and problem.batch % replicas == 0:
            return ranks
    return 0
