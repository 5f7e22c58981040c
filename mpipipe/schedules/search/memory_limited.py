"""The best schedule that can be found where forwards may be run again to keep a limit of memory.

An order that holds more than the limit may be the faster one, although some of its forwards are run again: waits hide
them. So orders are searched for several limits above the given one, `with_recompute` brings each within it, and the
fastest counts. Schedules of the package compete, and the search without any R. Of the fastest single actions are moved.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import TypeAlias

from mpipipe.errors import ArgumentError
from mpipipe.schedules import checks
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.checks import at_least_one, counts
from mpipipe.schedules.recompute import with_recompute
from mpipipe.schedules.replay import packed, replay
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.search.anneal import Budget, Share, anneal
from mpipipe.schedules.search.problem import NEVER
from mpipipe.schedules.search.search import one_by_one, placements, published, search, with_split_backwards
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, action_times, held, simulate, sizes_per_stage
from mpipipe.schedules.slices import in_slices

LAST = 0.5  # share of the budget in which single actions are moved
PLAIN = 0.4  # of what is left: for the search without R
ROOMS = (1.25, 1.5, 2.0, math.inf)  # limits to search for, in given ones; they share the rest


def search_with_recompute(
    placement: int | Sequence[int],
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    *,
    memory_limit: float,
    chunks: int = 1,
    kept_input: float | Sequence[float] = 0.0,
    slices: int = 1,
    seconds: float = 10.0,
    steps: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Search for the fastest schedule within a limit of memory, with forwards that are run again where that helps.

    The result is not slower than `search` with its share of the time, nor than `with_recompute` on any schedule of this
    package with the same stages on the same ranks. ArgumentError is raised where no choice keeps the limit, or an
    argument does not fit.

    Parameters
    ----------
    placement, microbatches, costs : as for `search`
        R takes as long as F.
    memory_limit : float
        What a rank may hold at once, in activations, as `peak_memory` counts it. It may be too small for any schedule
        that runs nothing again.
    chunks : int, optional
        As for `search`.
    kept_input : float or sequence of float, optional
        The share of an activation that stays where its forward is run again, 0 to 1: the input of the stage.
    slices : int, optional
        As for `search`.
    seconds, steps, seed : as for `search`
        What `with_recompute` takes is not counted.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> plain = schedules.with_recompute(schedules.one_f_one_b(4, 8), memory_limit=2)
    >>> found = schedules.search_with_recompute(4, 8, memory_limit=2, seconds=60, steps=100)
    >>> schedules.simulate(plain).makespan, schedules.simulate(found).makespan < 35
    (35.0, True)
    """
    microbatches, slices = counts(microbatches=microbatches, slices=slices)
    units, limit = microbatches * slices, checks.number("memory_limit", memory_limit)
    checks.check_time(seconds)
    steps = None if steps is None else at_least_one("steps", steps)
    places = placements(placement, chunks)
    fewest = max(max(map(place.count, set(place))) for place in places)
    goal = (1 + 1e-9) * min(least_time(place, units, costs, None, slices=slices) for place in places)
    best: tuple[float, int, Schedule] | None = None
    refusal: ArgumentError | None = None
    budget = seconds * (1 - LAST), None if steps is None else max(1, int(steps * (1 - LAST))), seed
    for schedule in _orders(places, units, costs.of_mean_slice(), limit, fewest, budget):
        try:
            within = with_recompute(in_slices(schedule, slices), costs, limit, kept_input=kept_input)
        except ArgumentError as error:
            refusal = refusal or error
            continue
        score = simulate(within, costs).makespan, len(within.recomputed)
        if best is None or score < best[:2]:
            best = *score, within
        if best[0] <= goal:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    last = Budget(seconds * LAST, None if steps is None else max(1, int(steps * LAST)))
    fastest = Annealing(best[2], costs, limit, kept_input, Random(seed)).run(goal, last.until(1.0))
    return replace(fastest, name="search")


def _orders(
    places: Sequence[tuple[int, ...]],
    microbatches: int,
    costs: Costs,
    limit: float,
    fewest: int,
    budget: tuple[float, int | None, int],
) -> Iterator[Schedule]:
    """Yield the schedules of the package, and searched ones, for the limit and for larger ones."""
    seconds, steps, seed = budget
    rooms = [room * limit for room in ROOMS if room * limit >= fewest]
    for place in places:
        yield one_by_one(place, microbatches)
        for room in (limit, *rooms):
            yield from published(place, microbatches, costs, max(1, min(room, microbatches)))
    shares = [(limit, PLAIN)] if limit >= fewest else []
    shares += [(room, (1 - sum(share for _, share in shares)) / len(rooms)) for room in rooms]
    for place in places:
        for room, share in shares:
            share /= len(places)
            yield search(
                place,
                microbatches,
                costs,
                memory_limit=room,
                seconds=seconds * share,
                steps=None if steps is None else max(1, int(steps * share)),
                seed=seed,
            )


# -- Improve a schedule that runs forwards again: move single actions within their rank, take R's out, and put R's in
#
# Each state of the annealing keeps the limit of memory, the order F, R, I, W of every unit in a stage, and that of the
# F's and I's of a sequence; one in which ranks wait for each other for ever is not kept.


PLACE_IN_LIFE = {FORWARD: 0, RECOMPUTE: 1, INPUT_GRAD: 2, WEIGHT_GRAD: 3}  # of a micro-batch in a stage
ORDERED = (FORWARD, INPUT_GRAD)  # of the slices of a sequence
FAR = 8  # slots by which an action is moved, at most
WARM = 0.02  # of the longest action: how much slower a step on the way may be
CHANGES = 0.1  # share of steps that take an R out or put one in
Order: TypeAlias = "list[Action]"
State: TypeAlias = "tuple[list[Order], list[array[int]]]"  # the orders of all ranks, and the same packed


class Annealing:
    """Orders with R's, and the time they take; the backwards of `schedule` are split first."""

    def __init__(
        self, schedule: Schedule, costs: Costs, limit: float, kept_input: float | Sequence[float], random: Random
    ) -> None:
        self.schedule, self.random, self.limit = schedule, random, limit * (1 + 1e-9)
        self.whole, self.kept = sizes_per_stage(schedule, 1.0, kept_input)
        self.shares = costs.per_slice(schedule.slices)
        self.seconds, self.transfer = action_times(costs, schedule.stages), costs.per_stage("transfer", schedule.stages)
        self.orders = [*map(with_split_backwards, schedule.orders)]
        self.codes = [packed(order, schedule.units) for order in self.orders]
        self.makespan = self._time_of(self.codes)
        single = (times for op, times in self.seconds.items() if op != BACKWARD)
        self.warm = WARM * (max(map(max, single)) or 1.0)

    def run(self, goal: float, share: Share) -> Schedule:
        """Change the orders until the goal is reached or the budget is used up; return the fastest."""
        states = anneal(
            (self.orders, self.codes), self.makespan, self._changed, share, self.random, self.warm, self.warm
        )
        while self.makespan > goal and (taken := next(states, None)) is not None:
            (orders, codes), makespan = taken
            if makespan < self.makespan:
                self.makespan, self.orders, self.codes = makespan, orders, codes
        return replace(self.schedule, orders=tuple(map(tuple, self.orders)))

    def _time_of(self, codes: Sequence[array[int]]) -> float:
        """Return the makespan, NEVER where the ranks stand still."""
        placement, microbatches = self.schedule.placement, self.schedule.units
        starts, ends = replay(placement, microbatches, self.seconds, self.transfer, codes, self.shares)
        return max(ends) if all(len(began) == len(order) for began, order in zip(starts, codes)) else NEVER

    def _changed(self, state: State) -> tuple[State, float] | None:
        """Change the order of one rank; None where that is not allowed."""
        orders, codes = list(state[0]), list(state[1])
        rank = self.random.randrange(len(orders))
        order = self._changed_order(orders[rank])
        if order is None or max(held(order, self.whole, self.kept)) > self.limit:
            return None
        orders[rank], codes[rank] = order, packed(order, self.schedule.units)
        return (orders, codes), self._time_of(codes)

    def _changed_order(self, order: Order) -> Order | None:
        draw, new, slices = self.random, list(order), self.schedule.slices
        place = draw.randrange(len(order))
        if draw.random() < CHANGES:
            stage, _, microbatch = order[place]
            again = Action(stage, RECOMPUTE, microbatch)
            if again in order:
                new.remove(again)
            else:
                new.insert(new.index(Action(stage, INPUT_GRAD, microbatch)), again)
            return new
        action = new.pop(place)
        target = min(max(0, place + draw.choice((-1, 1)) * draw.randint(1, FAR)), len(new))
        crossed = order[target:place] if target < place else order[place + 1 : target + 1]
        sign = -1 if target < place else 1
        for stage, op, microbatch in crossed:
            if (stage, microbatch) == (action.stage, action.microbatch):
                if sign * (PLACE_IN_LIFE[op] - PLACE_IN_LIFE[action.op]) > 0:
                    return None
            elif slices > 1 and op == action.op and op in ORDERED and stage == action.stage:
                if microbatch // slices == action.microbatch // slices:
                    return None
        new.insert(target, action)
        return new
