"""The search for a block of a given period: what a rank does for one micro-batch, and the same one period later.

    phase    0    1    2    3    4    5        the actions of a rank on a circle as long as the period
    rank 0   F    f    i    W    I    w        none may overlap; at no F more activations may live than the limit

No order is run on paper here: a step looks at those ranks alone whose actions it moves, and at one period of each. So
many more blocks are tried than by the time that all micro-batches take (see `repeated_block`). That is modulo
scheduling (Rau 1994), with memory in place of registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from mpipipe.schedules.kinds import Form
from mpipipe.schedules.repeated_block import Block, Times

SLACK = (0.0, 0.01, 0.03, 0.06, 0.1, 0.16, 0.25)  # shares by which a period is longer than the shortest
HOT, COLD = 0.15, 0.004  # of the busiest rank's time: how much worse a step may be, first and last
OVERLAP, ABOVE, LIVES = 3.0, 0.5, 0.3  # what counts: times that overlap, activations above the limit, and on average
SNAP, SUFFIX = 0.5, 0.4  # shares of changes: an action put beside another of its rank; all that comes after it moves
TINY = 1e-9


class Cycle:
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
        self.later = {kind: self.chain[place:] for place, kind in enumerate(self.chain)}
        self.earliest = Block(form, random).earliest().first
        lives = [
            math.fsum(self._end(self.earliest, 3 * stage + 2) - self.earliest[3 * stage] for stage in stages)
            for stages in form.own
        ]
        self.shortest = max(self.busy, max(lives) / form.limit)

    def search(self, share: Callable[[], float]) -> Times | None:
        """Try periods, the shortest first, until the `share` of the budget is 1; return the first block that fits.

        Each one begins with a block whose actions do not overlap, and with the shortest one, in which memory is least.
        """
        tries = [(self.shortest * (1 + slack), packed) for slack in SLACK for packed in (True, False)]
        for number, (period, packed) in enumerate(tries):
            first = self._fit(period, packed, share, (number / len(tries), (number + 1) / len(tries)))
            if first is not None:
                return Times(first, period)
        return None

    def _fit(
        self, period: float, packed: bool, share: Callable[[], float], those: tuple[float, float]
    ) -> list[float] | None:
        """Return the times of the shortest block of this period that was found, None where all of them collide.

        `those` are the shares of the budget between which it is searched.
        """
        begin, end = those
        draw, best, least = self.random, None, math.inf
        first = self.packed(period) if packed else list(self.earliest)
        costs = [self._cost(rank, first, period) for rank in range(len(self.kinds))]
        energy = sum(costs) + self._length(first)
        while (used := share()) < end:
            trial = self._changed(first, period)
            changed = {self.form.rank[kind] for kind, (old, new) in enumerate(zip(first, trial)) if old != new}
            more = list(costs)
            for rank in changed:
                more[rank] = self._cost(rank, trial, period)
            worse = sum(more) + self._length(trial) - energy
            warm = self.busy * HOT * (COLD / HOT) ** max(0.0, (used - begin) / (end - begin))
            if worse <= 0 or draw.random() < math.exp(-worse / warm):
                first, costs, energy = trial, more, energy + worse
                if energy < least and sum(costs) <= TINY * self.busy:
                    best, least = first, energy
        return best

    def packed(self, period: float) -> list[float]:
        """Return each action as early as it does not overlap another one; W's come last. Memory does not count."""
        form, first = self.form, list(self.earliest)
        taken: list[list[int]] = [[] for _ in form.own]
        for kind in sorted(self.chain, key=lambda each: each % 3 == 2):
            before, time, others = form.waits_for[kind], form.seconds[kind], taken[form.rank[kind]]
            soonest = first[before] + form.seconds[before] + form.lag[kind] if before >= 0 else 0.0
            places = [soonest, *(soonest + (self._end(first, other) - soonest) % period for other in others)]
            free = (
                place
                for place in sorted(places)
                if all(
                    (place - first[other]) % period >= form.seconds[other] - TINY * period
                    and (first[other] - place) % period >= time - TINY * period
                    for other in others
                )
            )
            first[kind] = next(free, soonest)
            others.append(kind)
        return first

    def _end(self, first: list[float], kind: int) -> float:
        return first[kind] + self.form.seconds[kind]

    def _length(self, first: list[float]) -> float:
        """Return what the length of the block costs each micro-batch."""
        return max(map(first.__getitem__, self.chain[-2:])) / self.form.microbatches

    def _cost(self, rank: int, first: list[float], period: float) -> float:
        """Return what is wrong with the block on a rank: nothing where it fits."""
        seconds, found = self.form.seconds, 0.0
        phases = sorted((first[kind] % period, seconds[kind]) for kind in self.kinds[rank])
        before, time = phases[-1]
        end = before - period + time
        for phase, time in phases:
            if end > phase + TINY * period:
                found += OVERLAP * (end - phase)
            end = phase + time
        lives = [(first[3 * stage], self._end(first, 3 * stage + 2)) for stage in self.form.own[rank]]
        total = sum(close - opened for opened, close in lives) / period - self.form.limit
        if total > TINY:
            found += LIVES * self.busy * total
        peak = 0
        for moment, _ in lives:
            held = sum(
                math.floor((moment - opened) / period + TINY) - math.floor((moment - close) / period + TINY)
                for opened, close in lives
            )
            peak = max(peak, held)
        return found + ABOVE * self.busy * max(0, peak - self.form.limit)

    def _changed(self, first: list[float], period: float) -> list[float]:
        draw, form, new = self.random, self.form, list(first)
        kind = self.chain[draw.randrange(len(self.chain))]
        if draw.random() < SNAP:
            other = draw.choice(self.kinds[form.rank[kind]])
            goal = self._end(first, other) if draw.random() < 0.5 else first[other] - form.seconds[kind]
            shift = (goal - first[kind]) % period - (period if draw.random() < 0.5 else 0.0)
        else:
            shift = draw.gauss(0, 1) * self.busy * draw.choice((0.1, 0.3))
        for each in self.later[kind] if draw.random() < SUFFIX else (kind,):
            new[each] += shift
        for each in self.chain:  # nothing comes before what it waits for
            before = form.waits_for[each]
            soonest = new[before] + form.seconds[before] + form.lag[each] if before >= 0 else 0.0
            if new[each] < soonest:
                new[each] = soonest
        return new
