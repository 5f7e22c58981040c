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
from typing import Any, TypeAlias

from mpipipe import processor
from mpipipe.errors import MpipipeError
from mpipipe.job import fair_shares, group_of, single_cores
from mpipipe.planning.find import PlanReport, profile_of, shown_seconds
from mpipipe.planning.probe import measure_threads
from mpipipe.planning.problem import MeasuredRanks, PlanningProblem
from mpipipe.planning.profile import Profile
from mpipipe.planning.saved import SavedProfile, combined
from mpipipe.planning.search import Plan, find_plans
from mpipipe.text import counted, shown_bytes, text_table

# of a rank: its host, the cores that it may run on, and the number of its ring, whose ranks compute together
RankPlace: TypeAlias = "tuple[str, Collection[int], int]"

NEAR = 0.03  # of a step: among placements so near to the fastest the one with the fewest ranks takes the least memory


@dataclass(frozen=True)
class Placement:
    """A number of ranks on each node, and of threads of each.

    `speed` is that of a rank, as a multiple of what it is with one thread. `plan` is the fastest plan, if there is one.
    """

    ranks: int
    threads: int
    speed: float
    plan: Plan | None

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return float("inf") if self.plan is None else self.plan.prediction.seconds

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        shown = ("no plan", "-")
        if self.plan is not None:
            shown = shown_seconds(self.seconds), shown_bytes(self.ranks * self.plan.prediction.peak)
        return str(self.ranks), str(self.threads), f"{self.speed:.2f}", *shown


def compare_placements(measured: MeasuredRanks, found: PlanReport, pipe: int | None) -> list[str]:
    """Compare numbers of ranks and threads for the cores of a node, after `find_plan`; collective over all ranks.

    `pipe` is the number of ranks of a pipeline where that is given; else all ranks make one pipeline. Returns on rank 0
    the lines of a table and what is proposed, or why nothing is compared.
    """
    mesh, group = measured.mesh, group_of(measured.mesh.comm)
    ring = mesh.data.rank * mesh.pipe.size + mesh.pipe.rank
    places = group.gather("plan: the cores of all ranks", (socket.gethostname(), single_cores(), ring))
    most = min(len(own) for _, own, _ in places)
    if reason := _reason(most, found.oversubscribed):
        return [f"ranks and threads were not compared: {reason}"]
    base = min(fair_shares([(host, own) for host, own, _ in places]))  # threads with which the plan was measured
    at_work = {count: rings_at_work(places, count) for count in thread_counts(most, base)}
    times = measure_threads(measured, {count: ring in rings for count, rings in at_work.items() if rings})
    everyone = group.gather("plan: what threads gain", times)
    lines: list[str] = []
    with group.raise_together("plan: ranks and threads"):
        if group.rank == 0:
            counts = sorted(set().union(*everyone))
            means = {count: combined(fmean, *(each[count] for each in everyone if count in each)) for count in counts}
            nodes = host_cores(places)
            cores = min(nodes.values())
            made = placements(measured.problem, found.profile, means, base, len(nodes), cores, pipe)
            lines += table([*made], cores, (len(places) // len(nodes), base))
    return lines


def _reason(most: int, oversubscribed: str) -> str:
    """Return why nothing is compared among ranks that may have up to `most` threads; "" if there is no reason."""
    chosen = processor.chosen_threads()
    if chosen is not None:
        return f"a variable sets {counted(chosen, 'thread')}; unset MPIPIPE_THREADS, OMP_NUM_THREADS and its kin"
    if most < 2:
        return "a rank may run on one core alone, and has one thread"
    return "ranks share cores; start at most one for each core" if oversubscribed else ""


def table(found: Sequence[Placement], cores: int, present: tuple[int, int]) -> Iterator[str]:
    """Yield the lines of a table, and the placement with the fewest ranks among those with nearly the fastest step.

    `present` are the ranks on a node, and the threads, that the measured job has.
    """
    heads = ("ranks on a node", "threads", "speed of a rank", "step", "memory of a node")
    yield from text_table(heads, [each.row() for each in found], left=())
    limit = (1 + NEAR) * min((each.seconds for each in found), default=0.0)
    best = min((each for each in found if each.plan and each.seconds <= limit), key=lambda e: e.ranks, default=None)
    if best is not None:
        yield (
            f"on {counted(cores, 'core')} of a node: {counted(best.ranks, 'rank')} with "
            f"{counted(best.threads, 'thread')} each (the fewest ranks within {NEAR:.0%} of the fastest step)"
        )
        yield "in a script of SLURM, such as jobs/train.sbatch:"
        yield f"#SBATCH --ntasks-per-node={best.ranks}"
        yield f"#SBATCH --cpus-per-task={best.threads}"
        if (best.ranks, best.threads) != present:
            yield "start those and plan again: messages and sums that the ranks here do not have are not counted"


def host_cores(places: Sequence[RankPlace]) -> dict[str, int]:
    """Return how many cores of each host the ranks may run on."""
    cores: dict[str, set[int]] = {}
    for host, own, _ in places:
        cores.setdefault(host, set()).update(own)
    return {host: len(used) for host, used in cores.items()}


def thread_counts(most: int, base: int) -> list[int]:
    """Return the numbers of threads to try: powers of two up to `most`, that one, and `base`."""
    return sorted({base, most, *(1 << power for power in range(most.bit_length()))})


def rings_at_work(places: Sequence[RankPlace], threads: int) -> set[int]:
    """Return the rings whose ranks compute while each has this number of threads: on each host as many as have room."""
    cores, ranks, idle = host_cores(places), Counter[str](), set()
    for host, _, ring in places:
        ranks[host] += 1
        if ranks[host] * threads > cores[host]:
            idle.add(ring)
    return {ring for _, _, ring in places} - idle


def placements(
    problem: PlanningProblem,
    profile: Profile,
    times: Mapping[int, Sequence[tuple[float, float]]],
    base: int,
    nodes: int,
    cores: int,
    pipe: int | None,
) -> Iterator[Placement]:
    """Yield for each number of threads as many ranks as fit a node, and their plan.

    `profile` was measured with `base` threads, and `times` are what `measure_threads` returns.
    """
    for threads, own in times.items():
        ranks = most_ranks(problem, nodes, cores // threads, pipe)
        if not ranks:
            continue
        pipeline = pipe or nodes * ranks // problem.seq
        other = replace(problem, ranks=pipeline, replicas=nodes * ranks // (pipeline * problem.seq))
        shares = [(step / first, update / early) for (step, update), (first, early) in zip(own, times[base])]
        costs = {size: _scaled(share, profile.costs[size]) for size, (share, _) in zip(problem.space.sizes, shares)}
        optimizer = _scaled(fmean(share for _, share in shares), profile.optimizer)
        scaled = replace(profile, costs=costs, optimizer=optimizer)
        saved, plan = SavedProfile.of(scaled, problem.signatures, problem.facts), None
        try:
            plan = find_plans(profile_of(other, saved, other.space.sizes), other.space, other.memory_limit)[0]
        except MpipipeError:  # what is fixed, or the limit of memory, does not fit so many ranks
            pass
        yield Placement(ranks, threads, sum(step for step, _ in times[1]) / sum(step for step, _ in own), plan)


def _scaled(share: float, record: Any) -> Any:
    return combined(lambda numbers: share * numbers[0], record)


def most_ranks(problem: PlanningProblem, nodes: int, most: int, pipe: int | None) -> int:
    """Return how many ranks each node can have, up to `most`, so that they make a mesh for the batch; 0 if none can."""
    for ranks in range(most, 0, -1):
        pipeline = pipe or nodes * ranks // problem.seq
        replicas, rest = divmod(nodes * ranks, max(1, pipeline) * problem.seq)
        if 1 <= pipeline <= len(problem.layers) and replicas and not rest and problem.batch % replicas == 0:
            return ranks
    return 0
