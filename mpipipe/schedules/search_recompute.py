"""The best schedule that can be found where forwards may be run again to keep a limit of memory.

An order that holds more than the limit may be the faster one, although some of its forwards are run again: waits hide
them. So orders are searched for several limits above the given one, `with_recompute` brings each within it, and the
fastest counts. Schedules of the package compete, and the search without any R. Of the fastest single actions are moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from mpipipe.errors import ArgumentError
from mpipipe.schedules import kinds
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.improve import Budget
from mpipipe.schedules.kinds import NEVER, hops
from mpipipe.schedules.memory import sizes_per_stage
from mpipipe.schedules.recompute import with_recompute
from mpipipe.schedules.schedule import Schedule, at_least_one
from mpipipe.schedules.search import placements, published, search
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, simulate

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
    seconds: float = 10.0,
    steps: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Search for the fastest schedule within a limit of memory, with forwards that are run again where that helps.

    The result is not slower than `search` with its share of the time, nor than `with_recompute` on any schedule of this
    package with the same stages on the same ranks.

    Parameters
    ----------
    placement : int or sequence of int
        The number of ranks P, or the rank of each stage, as for `search`.
    microbatches : int
        M, at least 1.
    costs : Costs, optional
        Times of the stages; by default one unit for each of F, I and W. R takes as long as F.
    memory_limit : float
        What a rank may hold at once, in activations, as `peak_memory` counts it. It may be too small for any schedule
        that runs nothing again.
    chunks : int, optional
        V, stages per rank, where `placement` is a number of ranks.
    kept_input : float or sequence of float, optional
        The share of an activation that stays where its forward is run again, 0 to 1: the input of the stage.
    seconds : float, optional
        Time to search, on one core; what `with_recompute` takes is not counted.
    steps : int, optional
        Orders to try; where these end before the time, the result is the same on every machine.
    seed : int, optional
        Where the changes begin that are drawn at random.

    Returns
    -------
    Schedule
        The fastest that was found, with the name "search".

    Raises
    ------
    ArgumentError
        A count is below 1, a cost or size does not fit, no choice keeps the limit, or there is no time.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> plain = schedules.with_recompute(schedules.one_f_one_b(4, 8), memory_limit=2)
    >>> found = schedules.search_with_recompute(4, 8, memory_limit=2, seconds=60, steps=100)
    >>> schedules.simulate(plain).makespan, schedules.simulate(found).makespan < 35
    (35.0, True)
    """
    microbatches, limit = at_least_one("microbatches", microbatches), kinds.number("memory_limit", memory_limit)
    kinds.check_time(seconds)
    steps = None if steps is None else at_least_one("steps", steps)
    places = placements(placement, chunks)
    fewest = max(max(map(place.count, set(place))) for place in places)
    goal = (1 + 1e-9) * min(least_time(place, microbatches, costs, None) for place in places)
    best: tuple[float, int, Schedule] | None = None
    refusal: ArgumentError | None = None
    budget = seconds * (1 - LAST), None if steps is None else max(1, int(steps * (1 - LAST))), seed
    for schedule in _orders(places, microbatches, costs, limit, fewest, budget):
        try:
            found = with_recompute(schedule, costs, limit, kept_input=kept_input)
        except ArgumentError as error:
            refusal = refusal or error
            continue
        score = simulate(found, costs).makespan, len(found.recomputed)
        if best is None or score < best[:2]:
            best = *score, found
        if best[0] <= goal:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    last = Budget(seconds * LAST, None if steps is None else max(1, int(steps * LAST)))
    found = Annealing(best[2], costs, limit, kept_input, Random(seed)).run(goal, last.goes_on)
    return Schedule("search", found.placement, microbatches, found.orders)


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
        yield _one_by_one(place, microbatches)
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


def _one_by_one(place: Sequence[int], microbatches: int) -> Schedule:
    """Return the schedule that needs the least memory: each micro-batch goes forth and back before the next one."""
    ways = [(stage, FORWARD) for stage in range(len(place))] + [
        (stage, BACKWARD) for stage in reversed(range(len(place)))
    ]
    orders = tuple(
        tuple(Action(stage, op, number) for number in range(microbatches) for stage, op in ways if place[stage] == rank)
        for rank in range(max(place) + 1)
    )
    return Schedule("one_by_one", tuple(place), microbatches, orders)


# -- Improve a schedule that runs forwards again: move single actions within their rank, take R's out, and put R's in
#
# What is no slower is kept, and now and then what is a little slower (annealing). Each state keeps the limit of memory,
# and the order F, R, I, W of every micro-batch in a stage; one in which ranks wait for each other for ever is not kept.


RANK_OF = {FORWARD: 0, RECOMPUTE: 1, INPUT_GRAD: 2, WEIGHT_GRAD: 3}  # in the life of a micro-batch
FAR = 8  # slots by which an action is moved, at most
WARM = 0.02  # of the longest action: how much slower a step on the way may be
CHANGES = 0.1  # share of steps that take an R out or put one in
Order = list[Action]


class Annealing:
    """Orders with R's, and the time they take.

    Parameters
    ----------
    schedule : Schedule
        To begin with; its backwards are split.
    costs : Costs
        Times of the stages.
    limit : float
        What a rank may hold.
    kept_input : float or sequence of float
        What stays of an activation of 1 where an R follows.
    random : Random
        Where changes come from.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, limit: float, kept_input: float | Sequence[float], random: Random
    ) -> None:
        self.schedule, self.random = schedule, random
        self.limit = limit * (1 + 1e-9)
        self.whole, self.kept = sizes_per_stage(schedule, 1.0, kept_input)
        names = {FORWARD: "forward", INPUT_GRAD: "input_grad", WEIGHT_GRAD: "weight_grad", RECOMPUTE: "recompute"}
        self.seconds = {op: costs.per_stage(name, schedule.stages) for op, name in names.items()}
        self.hop = hops(schedule.placement, costs)
        self.orders = [[each for action in order for each in _split(action)] for order in schedule.orders]
        self.makespan = self.time_of(self.orders)
        self.warm = WARM * (max(map(max, self.seconds.values())) or 1.0)

    def run(self, goal: float, goes_on: Callable[[], bool]) -> Schedule:
        """Change the orders until the goal is reached or nothing goes on; return the fastest."""
        now, best = self.makespan, list(self.orders)
        while self.makespan > goal and goes_on():
            rank = self.random.randrange(len(self.orders))
            old = self.orders[rank]
            new = self._changed(old)
            if new is None:
                continue
            self.orders[rank] = new
            makespan = self.time_of(self.orders)
            longer = makespan - now
            if longer <= 0 or self.random.random() < math.exp(-longer / self.warm):
                now = makespan
                if makespan < self.makespan:
                    self.makespan, best = makespan, list(self.orders)
            else:
                self.orders[rank] = old
        return replace(self.schedule, orders=tuple(map(tuple, best)))

    def time_of(self, orders: Sequence[Order]) -> float:
        """Return the makespan, NEVER where the ranks stand still."""
        last, seconds, hop = self.schedule.stages - 1, self.seconds, self.hop
        ends: dict[tuple[str, int, int], float] = {}
        slots, clocks = [0] * len(orders), [0.0] * len(orders)
        asleep: dict[tuple[str, int, int], int] = {}
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            order, slot, now = orders[rank], slots[rank], clocks[rank]
            while slot < len(order):
                stage, op, microbatch = order[slot]
                if op == FORWARD and stage:
                    awaited, lag = (FORWARD, stage - 1, microbatch), hop[stage]
                elif op == INPUT_GRAD and stage < last:
                    awaited, lag = (INPUT_GRAD, stage + 1, microbatch), hop[stage + 1]
                else:
                    awaited, lag = None, 0.0
                if awaited is not None:
                    end = ends.get(awaited)
                    if end is None:
                        asleep[awaited] = rank
                        break
                    now = max(now, end + lag)
                now += seconds[op][stage]
                if op in (FORWARD, INPUT_GRAD):
                    made = op, stage, microbatch
                    ends[made] = now
                    if made in asleep:
                        ready.append(asleep.pop(made))
                slot += 1
            slots[rank], clocks[rank] = slot, now
        return max(clocks) if all(slot == len(order) for slot, order in zip(slots, orders)) else NEVER

    def _changed(self, order: Order) -> Order | None:
        """Return another order of a rank, None where the change is not allowed."""
        draw, new = self.random, list(order)
        place = draw.randrange(len(order))
        if draw.random() < CHANGES:
            stage, _, microbatch = order[place]
            again = Action(stage, RECOMPUTE, microbatch)
            if again in order:
                new.remove(again)
            else:
                new.insert(new.index(Action(stage, INPUT_GRAD, microbatch)), again)
        else:
            action = new.pop(place)
            target = min(max(0, place + draw.choice((-1, 1)) * draw.randint(1, FAR)), len(new))
            crossed = order[target:place] if target < place else order[place + 1 : target + 1]
            sign = -1 if target < place else 1
            for stage, op, microbatch in crossed:
                if (stage, microbatch) == (action.stage, action.microbatch):
                    if sign * (RANK_OF[op] - RANK_OF[action.op]) > 0:
                        return None
            new.insert(target, action)
        return new if self._peak(new) <= self.limit else None

    def _peak(self, order: Order) -> float:
        """Return what a rank holds at most, as `memory.held` counts it."""
        again = {(stage, microbatch) for stage, op, microbatch in order if op == RECOMPUTE}
        now = peak = 0.0
        for stage, op, microbatch in order:
            whole = self.whole[stage]
            if op == FORWARD:
                peak = max(peak, now + whole)
                now += self.kept[stage] if (stage, microbatch) in again else whole
            elif op == RECOMPUTE:
                now += whole - self.kept[stage]
                peak = max(peak, now)
            elif op == WEIGHT_GRAD:
                now -= whole
        return peak


def _split(action: Action) -> tuple[Action, ...]:
    if action.op != BACKWARD:
        return (action,)
    return action._replace(op=INPUT_GRAD), action._replace(op=WEIGHT_GRAD)
