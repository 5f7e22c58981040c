"""The search for a block that is repeated: a time for each kind, and the same time one period later for the next one.

An order of all actions follows from these few numbers: each rank runs its actions by time. So a change of one number is
a change of the whole middle, which moves of single actions never find. What holds more than the limit of memory, or
makes ranks wait for each other, counts as slower; the search may pass through it (annealing).

V-Half and V-Min are such blocks, made by hand for equal costs (Qi et al. 2024, arXiv:2405.15362).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from mpipipe.schedules.kinds import NEVER, Ends, Form, Orders

HOT, COLD = 0.6, 0.02  # of the busiest rank's time for one micro-batch: how much slower a step may be, first and last
ABOVE = 0.7  # of that time: what an activation above the limit counts
SUFFIX = 0.4  # share of changes that shift all that comes after a kind, too
STRETCH = 0.05  # share of changes that are of the period
LONG = 1e3  # busy times that a standstill counts
TINY = 1e-6


class Times(NamedTuple):
    """A block: the time of each kind for micro-batch 0, and how much later it is for the next one."""

    first: list[float]
    period: float


class Block:
    """The search for the block of a form.

    Parameters
    ----------
    form : Form
        What is ordered.
    random : Random
        Where changes come from.
    """

    def __init__(self, form: Form, random: Random) -> None:
        self.form, self.random, self.busy = form, random, form.busy or 1.0
        self.chain = form.chain()
        self.kinds = [[3 * stage + op for stage in stages for op in range(3)] for stages in form.own]

    def earliest(self) -> Times:
        """Return the times of one micro-batch alone."""
        first = [0.0] * len(self.form.seconds)
        for kind in self.chain:
            before = self.form.waits_for[kind]
            if before >= 0:
                first[kind] = first[before] + self.form.seconds[before] + self.form.lag[kind]
        return Times(first, self.busy)

    def middle(self, ends: Ends) -> Times:
        """Return the times in the middle of a schedule."""
        half = self.form.microbatches // 2
        first = [of_kind[half] - time - half * self.busy for of_kind, time in zip(ends, self.form.seconds)]
        return Times(first, self.busy)

    def search(self, times: Times, share: Callable[[], float]) -> Times | None:
        """Change the times until the `share` of the budget that is used up is 1.

        Returns those of the fastest orders within the limit, None where all were above it.
        """
        draw, best, least = self.random, None, NEVER
        orders = self.orders(times)
        above = [self._above(order) for order in orders]
        energy = self._energy(orders, above)
        while (used := share()) < 1:
            new = self._changed(times)
            all_change = new.period != times.period
            pairs = zip(times.first, new.first)
            changed = {self.form.rank[kind] for kind, (old, now) in enumerate(pairs) if all_change or old != now}
            trial, more = list(orders), list(above)
            for rank in changed:
                trial[rank] = self._order(rank, new)
                more[rank] = self._above(trial[rank])
            longer = 0.0 if trial == orders else self._energy(trial, more) - energy
            warm = self.busy * HOT * (COLD / HOT) ** used
            if longer <= 0 or draw.random() < math.exp(-longer / warm):
                times, orders, above, energy = new, trial, more, energy + longer
                if energy < least and not any(above):
                    best, least = times, energy
        return best

    def orders(self, times: Times) -> Orders:
        """Return the orders of all ranks that follow from times."""
        return [self._order(rank, times) for rank in range(len(self.form.own))]

    def _order(self, rank: int, times: Times) -> list[int]:
        first, period = times
        count = range(self.form.microbatches)
        return [
            kind for _, kind in sorted((first[kind] + k * period, kind) for kind in self.kinds[rank] for k in count)
        ]

    def _energy(self, orders: Orders, above: list[int]) -> float:
        makespan, ends = self.form.replay(orders)
        if makespan == NEVER:  # less far from a schedule the more could run
            ran = sum(map(len, ends)) / (len(ends) * self.form.microbatches)
            return LONG * self.busy * (2 - ran)
        return makespan + ABOVE * self.busy * sum(above)

    def _above(self, order: list[int]) -> int:
        """Return by how much the most that an order holds is above the limit."""
        held = peak = 0
        for kind in order:
            if kind % 3 == 0:
                held += 1
                peak = max(peak, held)
            elif kind % 3 == 2:
                held -= 1
        return max(0, peak - self.form.limit)

    def _changed(self, times: Times) -> Times:
        draw, first = self.random, list(times.first)
        if draw.random() < STRETCH:
            return Times(first, max(self.busy, times.period * (1 + draw.gauss(0, 0.02))))
        place = draw.randrange(len(self.chain))
        shift = draw.gauss(0, 1) * self.busy * draw.choice((0.1, 0.3, 1.0))
        for kind in self.chain[place:] if draw.random() < SUFFIX else (self.chain[place],):
            first[kind] += shift
        for kind in self.chain:  # nothing comes before what it waits for
            before = self.form.waits_for[kind]
            if before >= 0:
                first[kind] = max(first[kind], first[before] + TINY * self.busy)
        return Times(first, times.period)
