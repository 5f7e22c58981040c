"""The search for a block that repeats: what a rank does for one micro-batch, and the same one period later.

    phase    0    1    2    3    4    5        the actions of a rank on a circle as long as the period
    rank 0   F    f    i    W    I    w        none may overlap; at no F more activations may live than the limit

An order of all actions follows from few numbers, a time for each task: each rank runs its actions by time. A change of
one number is a change of the whole middle, which moves of single actions never find. V-Half and V-Min are such blocks,
made by hand for equal costs (Qi et al. 2024, arXiv:2405.15362). The search runs no order on paper, and so tries many.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.search.anneal import Share, anneal
from mpipipe.schedules.search.problem import OrderProblem, Orders

SLACK = (0.0, 0.01, 0.03, 0.06, 0.1, 0.16, 0.25)  # shares by which a period is longer than the shortest
HOT, COLD = 0.15, 0.004  # of the busiest rank's time: how much worse a step may be, first and last
OVERLAP, ABOVE, LIVES = 3.0, 0.5, 0.3  # what counts: times that overlap, activations above the limit, and on average
SNAP, SUFFIX = 0.5, 0.4  # shares of changes: an action put next to another of its rank; all that comes after it moves
TINY = 1e-9

Starts: TypeAlias = "list[float]"  # of each task


class RepeatedBlock(NamedTuple):
    """The start of each task for micro-batch 0, and how much later it is for the next one."""

    starts: Starts
    period: float


def orders_of(problem: OrderProblem, block: RepeatedBlock) -> Orders:
    """Return the orders of all ranks that follow from a block."""
    starts, period = block
    orders = []
    for tasks in problem.tasks:
        runs = sorted((starts[task] + k * period, task) for task in tasks for k in range(problem.microbatches))
        orders.append([task for _, task in runs])
    return orders


class BlockSearch:
    """The search for the block of a given period: no two actions of a rank overlap, and memory suffices.

    A step looks at those ranks alone whose actions it moves, and at one period of each. That is modulo scheduling
    (Rau 1994), with memory in place of registers.
    """

    def __init__(self, problem: OrderProblem, random: Random) -> None:
        self.problem, self.random, self.busy = problem, random, problem.busy or 1.0
        self.chain = problem.chain()
        self.later = {task: self.chain[place:] for place, task in enumerate(self.chain)}
        self.alone = problem.alone()
        lives = [math.fsum(close - opened for opened, close in self._lives(self.alone, own)) for own in problem.own]
        self.shortest = max(self.busy, max(lives) / problem.limit)

    def search(self, share: Share) -> RepeatedBlock | None:
        """Try periods, the shortest first, until the `share` of the budget is 1; return the first block that fits.

        Each one begins with a block whose actions do not overlap, and with the shortest one, in which memory is least.
        """
        tries = [(self.shortest * (1 + slack), packed) for slack in SLACK for packed in (True, False)]
        for number, (period, packed) in enumerate(tries):
            begin = self.packed(period) if packed else self.alone
            starts = self._fit(period, begin, lambda: share() * len(tries) - number)  # noqa: B023
            if starts is not None:
                return RepeatedBlock(starts, period)
        return None

    def _fit(self, period: float, starts: Starts, share: Share) -> Starts | None:
        """Return the shortest block of this period that was found, None where all of them collide."""

        def changed(state: tuple[Starts, list[float]]) -> tuple[tuple[Starts, list[float]], float]:
            old, costs = state
            new, costs = self._changed(old, period), list(costs)
            for rank in {self.problem.rank[task] for task, pair in enumerate(zip(old, new)) if pair[0] != pair[1]}:
                costs[rank] = self._cost(rank, new, period)
            return (new, costs), sum(costs) + self._length(new)

        costs = [self._cost(rank, starts, period) for rank in range(len(self.problem.own))]
        first, hot, cold = sum(costs) + self._length(starts), self.busy * HOT, self.busy * COLD
        best, least = None, math.inf
        for (taken, wrong), energy in anneal((starts, costs), first, changed, share, self.random, hot, cold):
            if energy < least and sum(wrong) <= TINY * self.busy:
                best, least = taken, energy
        return best

    def packed(self, period: float) -> Starts:
        """Return each action as early as it does not overlap another one; W's come last. Memory does not count."""
        problem, starts = self.problem, list(self.alone)
        taken: list[list[int]] = [[] for _ in problem.own]
        for task in sorted(self.chain, key=lambda task: task % 3 == 2):
            time, others = problem.seconds[task], taken[problem.rank[task]]
            soonest = problem.earliest(task, starts)
            places = [soonest, *(soonest + (self._end(starts, other) - soonest) % period for other in others)]
            free = (
                place
                for place in sorted(places)
                if all(
                    (place - starts[other]) % period >= problem.seconds[other] - TINY * period
                    and (starts[other] - place) % period >= time - TINY * period
                    for other in others
                )
            )
            starts[task] = next(free, soonest)
            others.append(task)
        return starts

    def _end(self, starts: Starts, task: int) -> float:
        return starts[task] + self.problem.seconds[task]

    def _lives(self, starts: Starts, own: list[int]) -> list[tuple[float, float]]:
        """From when to when each stage of a rank holds the activation of micro-batch 0."""
        return [(starts[3 * stage], self._end(starts, 3 * stage + 2)) for stage in own]

    def _length(self, starts: Starts) -> float:
        """Return what the length of the block costs each micro-batch."""
        return max(map(starts.__getitem__, self.chain[-2:])) / self.problem.microbatches

    def _cost(self, rank: int, starts: Starts, period: float) -> float:
        """Return what is wrong with the block on a rank: nothing where it fits."""
        seconds, limit, cost = self.problem.seconds, self.problem.limit, 0.0
        phases = sorted((starts[task] % period, seconds[task]) for task in self.problem.tasks[rank])
        before, time = phases[-1]
        end = before - period + time
        for phase, time in phases:
            if end > phase + TINY * period:
                cost += OVERLAP * (end - phase)
            end = phase + time
        lives = self._lives(starts, self.problem.own[rank])
        total = sum(close - opened for opened, close in lives) / period - limit
        if total > TINY:
            cost += LIVES * self.busy * total
        peak = 0
        for moment, _ in lives:
            held = sum(
                math.floor((moment - opened) / period + TINY) - math.floor((moment - close) / period + TINY)
                for opened, close in lives
            )
            peak = max(peak, held)
        return cost + ABOVE * self.busy * max(0, peak - limit)

    def _changed(self, starts: Starts, period: float) -> Starts:
        draw, problem, new = self.random, self.problem, list(starts)
        task = self.chain[draw.randrange(len(self.chain))]
        if draw.random() < SNAP:
            other = draw.choice(problem.tasks[problem.rank[task]])
            goal = self._end(starts, other) if draw.random() < 0.5 else starts[other] - problem.seconds[task]
            shift = (goal - starts[task]) % period - (period if draw.random() < 0.5 else 0.0)
        else:
            shift = draw.gauss(0, 1) * self.busy * draw.choice((0.1, 0.3))
        for later in self.later[task] if draw.random() < SUFFIX else (task,):
            new[later] += shift
        for task in self.chain:  # none comes before what it waits for
            new[task] = max(new[task], problem.earliest(task, new))
        return new
