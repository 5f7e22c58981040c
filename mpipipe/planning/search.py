"""The search for the plan with the fastest step, among all that keep a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from mpipipe import schedules
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.planning.predict import Choice, Plan, predict
from mpipipe.planning.profile import Profile
from mpipipe.schedules import names
from mpipipe.text import counted, exact_bytes

CHUNKS = 4  # most stages on a rank that are tried
MOST_PER_RANK = 16  # micro-batches: more of them hardly make the bubble smaller
COUNTS = 5  # numbers of micro-batches that are tried
LIMITS = 4  # limits of recomputation that are tried for one schedule
REFINED = 6  # plans whose partition is improved
RECOMPUTATION = {"recompute", "recompute_limit"}  # fields of a Choice
MOVES = 60  # changes of a partition that are tried for each of them


@dataclass(frozen=True)
class Space:
    """The plans to search among.

    Raises ConfigError where no schedule fits the sizes and what is fixed.

    Parameters
    ----------
    ranks, layers, rows : int
        Ranks of a pipeline, layers of the model, and sequences of a step in each replica.
    fixed : mapping of str to object
        Fields of a Choice that stay as they are.
    trained : frozenset of int, optional
        Layers with something to train; by default all.

    Examples
    --------
    >>> from mpipipe.planning import Space
    >>> space = Space(ranks=2, layers=6, rows=8, fixed={"chunks": 1})
    >>> space.microbatches, space.forms[0]
    ([2, 4, 8], ('gpipe', 1))
    """

    ranks: int
    layers: int
    rows: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    trained: frozenset[int] | None = None

    def __post_init__(self) -> None:
        whole = sum(self.fixed.get("partition", ())) in (0, self.layers)
        if not whole or self.fixed.get("microbatches", 1) > self.rows or not self.forms:
            given = [f"{name} = {value}, " for name, value in self.fixed.items()]
            raise ConfigError(
                "no schedule fits the options that were given",
                found=f"{''.join(given)}{counted(self.ranks, 'rank')}, "
                f"{counted(self.layers, 'layer')}, {counted(self.rows, 'sequence')} a replica",
                expected="a layer for each stage, a partition of all layers, a sequence for each "
                "micro-batch, and a schedule with as many chunks",
                remedy="leave out one of the options, or start fewer ranks",
            )

    @property
    def microbatches(self) -> list[int]:
        """Return numbers of micro-batches to try: divisors of the sequences."""
        if "microbatches" in self.fixed:
            return [self.fixed["microbatches"]]
        most = min(self.rows, MOST_PER_RANK * self.ranks)
        least = min(-(-self.ranks // self.fixed.get("slices", 1)), self.rows)
        divisors = [count for count in range(least, most + 1) if self.rows % count == 0] or [most]
        step = (len(divisors) - 1) / (COUNTS - 1)
        places = {round(place * step) for place in range(COUNTS)}
        return [divisors[place] for place in sorted(places)]

    @property
    def forms(self) -> list[tuple[str, int]]:
        """(schedule, chunks) to try."""
        fixed = self.fixed
        stages = set(range(self.ranks, self.layers + 1, self.ranks))
        if "chunks" in fixed:
            stages &= {self.ranks * fixed["chunks"]}
        if "partition" in fixed:
            stages &= {len(fixed["partition"])}
        if not fixed.keys() & {"chunks", "partition"}:
            stages &= set(range(CHUNKS * self.ranks + 1))
        forms = []
        for count in sorted(stages):
            chunks = count // self.ranks
            for name in names(chunks):
                if name == fixed.get("schedule", name):
                    forms.append((name, chunks))
        return forms

    @property
    def sizes(self) -> list[int]:
        """Sequences of a micro-batch, for each number of them."""
        return sorted({-(-self.rows // count) for count in self.microbatches})


def find_plans(profile: Profile, space: Space, memory_limit: int | None = None) -> list[Plan]:
    """Find the plans with the fastest steps; ConfigError if none keeps the limit of memory.

    For each schedule and number of micro-batches the layers are cut by their measured time. The
    fastest plans are improved by moving a layer from a stage to its neighbour, as long as that
    helps.

    Parameters
    ----------
    profile : Profile
        What was measured, for all of `space.sizes`.
    space : Space
        The plans to search among.
    memory_limit : int, optional
        Bytes that a rank may need. Where a schedule needs more, forwards are run again, as few as
        that takes.

    Returns
    -------
    list of Plan
        One for each schedule, number of chunks and number of micro-batches that keeps the limit;
        the fastest first.

    Examples
    --------
    >>> from mpipipe.planning import LayerCosts, Link, Profile, RankCosts, Sizes, Space, find_plans
    >>> rank = RankCosts((LayerCosts(1.0, 2.0, 1.0, 1.0, 1.0),))
    >>> sizes = {1: [Sizes(saved=100)] * 2}
    >>> profile = Profile((0, 0), {1: (rank, rank)}, {1: Link()}, sizes, (8, 8))
    >>> best = find_plans(profile, Space(ranks=2, layers=2, rows=4, fixed={"microbatches": 4}))[0]
    >>> best.choice.schedule, best.seconds
    ('zero_bubble_h1', 13.0)
    """
    search = _Search(profile, space, math.inf if memory_limit is None else memory_limit)
    plans = []
    peaks = []
    for plan in search.plans():
        peaks.append(plan.peak)
        if plan.peak <= search.limit:
            plans.append(plan)
    if not plans:
        raise ConfigError(
            "no plan keeps this memory limit",
            found=f"memory_limit {exact_bytes(memory_limit or 0)} on each rank",
            expected=f"at least {exact_bytes(min(peaks))}",
            remedy="raise the limit, use more ranks for a pipeline, or lower batch, seq_len or "
            "the sizes of the model",
        )
    plans.sort(key=_rank)
    plans[:REFINED] = map(search.refined, plans[:REFINED])
    return sorted(plans, key=_rank)


def _rank(plan: Plan) -> tuple[float, int]:
    return plan.seconds, plan.peak


@dataclass(frozen=True)
class _Search:
    """A search with a limit of the bytes of a rank."""

    profile: Profile
    space: Space
    limit: float

    def plans(self) -> Iterator[Plan]:
        """Yield a plan for each form and number of micro-batches; some are above the limit.

        What cannot be built is left out, such as schedules that are too large; where nothing can,
        ArgumentError says why.
        """
        space = self.space
        seen = set()  # some schedules are the same with one stage on each rank
        for microbatches, (name, chunks) in product(space.microbatches, space.forms):
            fields = {"schedule": name, "chunks": chunks, "microbatches": microbatches}
            # Cutting many layers takes long, and a schedule that is too large is refused anyway.
            small = microbatches * chunks * space.ranks <= schedules.MOST_UNITS
            if small and "partition" not in space.fixed:
                size = -(-space.rows // microbatches)
                fields["partition"] = cut_by_time(self.profile, size, chunks * space.ranks)
            choice = Choice(**{"partition": (), **space.fixed, **fields})
            plan = self.predicted(choice)
            if plan is None:
                continue
            schedule = plan.schedule
            key = schedule.placement, schedule.orders
            if key in seen:
                continue
            seen.add(key)
            if plan.peak > self.limit and not RECOMPUTATION & space.fixed.keys():
                plan = self.recomputing(plan)
            yield plan
        if not seen:
            choice.build(space.ranks, space.trained)

    def recomputing(self, plan: Plan) -> Plan:
        """Return the plan with as many forwards run again as the limit asks for."""
        held = max(schedules.simulate(plan.schedule).peak_activations)
        limits = {held * part // (LIMITS + 1) for part in range(1, LIMITS + 1)} - {0, held}
        choices = [replace(plan.choice, recompute_limit=limit) for limit in sorted(limits)]
        for choice in [*reversed(choices), replace(plan.choice, recompute=True)]:
            plan = self.predicted(choice) or plan
            if plan.peak <= self.limit:
                break
        return plan

    def predicted(self, choice: Choice) -> Plan | None:
        """Return a plan; None where it cannot be built."""
        try:
            return predict(self.profile, choice, self.space.rows, self.space.trained)
        except ArgumentError:
            return None

    def refined(self, plan: Plan) -> Plan:
        """Move layers between neighbouring stages, as long as that makes the step faster."""
        if "partition" in self.space.fixed:
            return plan
        partitions = _neighbours(plan.choice.partition)
        for _ in range(MOVES):
            partition = next(partitions, None)
            if partition is None:
                break
            other = self.predicted(replace(plan.choice, partition=partition))
            if other is None or other.peak > self.limit:
                continue
            if other.seconds < plan.seconds:
                plan = other
                partitions = _neighbours(partition)
        return plan


def _neighbours(partition: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the partitions in which one stage has given a layer to a neighbour."""
    for place in range(len(partition) - 1):
        for giver, taker in ((place, place + 1), (place + 1, place)):
            if partition[giver] > 1:
                moved = list(partition)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


def cut_by_time(profile: Profile, size: int, stages: int) -> tuple[int, ...]:
    """Cut the layers so that the slowest stage is fast; return counts of layers.

    `size` are the sequences of a micro-batch.
    """
    costs = profile.costs[size]
    times = []
    for kind in profile.kinds:
        layers = [rank.layers[kind] for rank in costs]
        times.append(sum(layer.forward + layer.backward for layer in layers))
    times[-1] += sum(rank.loss for rank in costs)
    return tuple(stop - start for start, stop in schedules.partition(times, stages))
