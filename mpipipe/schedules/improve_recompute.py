"""Improve a schedule that runs forwards again: move single actions within their rank, take R's out, and put R's in.

What is no slower is kept, and now and then what is a little slower (annealing). Each state keeps the limit of memory,
and the order F, R, I, W of every micro-batch in a stage; one in which ranks wait for each other for ever is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.kinds import NEVER, hops
from mpipipe.schedules.memory import sizes_per_stage
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs

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
