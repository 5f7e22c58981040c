"""Cutting a chain of layers into stages: the slowest stage as fast as can be, the rest even."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Rational

from mpipipe.errors import ArgumentError
from mpipipe.schedules.schedule import at_least_one


def partition(costs, stages: int) -> list[tuple[int, int]]:
    """Cut layers into contiguous stages such that the dearest stage is as cheap as possible.

    Many cuts reach that bottleneck. Of these the one with the least sum of squared stage costs is taken, of equal
    ones that with the least sum of squared stage sizes, then the one with the longer stages first: ten equal layers
    in three stages are 4, 3, 3. All sums are exact, so that rounding does not decide.

    Parameters
    ----------
    costs : one number per layer, not negative
    stages : number of stages, 1 to the number of layers

    Returns
    -------
    list of (start, stop) : the layers of each stage, none empty

    Raises
    ------
    ArgumentError : stages below 1, fewer layers than stages, a negative or non-finite cost
    """
    stages = at_least_one("stages", stages)
    costs = _whole_numbers(list(costs))
    if len(costs) < stages:
        raise ArgumentError(
            "fewer layers than stages",
            found=f"{len(costs)} layers for {stages} stages",
            expected="at least one layer per stage",
            remedy="use fewer ranks or chunks, or more layers",
        )
    before = list(accumulate(costs, initial=0))  # before[i]: the cost of the layers ahead of layer i
    return _most_even(before, stages, _bottleneck(before, stages))


def _whole_numbers(costs) -> list[int]:
    """The costs as integers in the same proportions: a float is a fraction, and integers add without rounding."""
    fractions = []
    for layer, cost in enumerate(costs):
        try:
            fractions.append(Fraction(cost if isinstance(cost, Rational) else float(cost)))
        except (TypeError, ValueError, OverflowError):
            fractions.append(Fraction(-1))
        if fractions[-1] < 0:
            raise ArgumentError(
                f"the cost of layer {layer} is not usable", found=f"{cost!r}", expected="a finite number of at least 0"
            )
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _bottleneck(before, stages) -> int:
    """The least possible cost of the dearest stage.

    best[j] is that cost for the first j layers in k stages; for k + 1 stages it is the least over i of
    max(best[i], cost of layers i..j). In i the first term rises and the second falls: they cross at the minimum.
    """
    layers = len(before) - 1
    best = before
    for _ in range(1, stages):
        following = [0] * (layers + 1)
        for stop in range(1, layers + 1):
            cross = bisect_left(range(stop), True, key=lambda cut: best[cut] >= before[stop] - before[cut])
            following[stop] = min(
                max(best[cut], before[stop] - before[cut]) for cut in (cross - 1, cross) if 0 <= cut < stop
            )
        best = following
    return best[layers]


def _most_even(before, stages, bottleneck) -> list[tuple[int, int]]:
    """Among the cuts without a stage above `bottleneck`, the most even one."""
    layers = len(before) - 1
    scale = layers * layers + 1  # more than any sum of squared sizes: cost decides first

    def unevenness(start, stop):
        return (before[stop] - before[start]) ** 2 * scale + (stop - start) ** 2

    # From the back: price[start] of the layers start.. in the stages treated so far; None where there is no such cut.
    price: list[int | None] = [None] * layers + [0]
    choices: list[list[int]] = []
    for later in range(stages):
        earlier: list[int | None] = [None] * (layers + 1)
        choice = [0] * layers  # where the stage that starts at a layer stops
        for start in range(stages - 1 - later, layers - later):
            for stop in range(start + 1, layers - later + 1):
                if before[stop] - before[start] > bottleneck:
                    break
                rest, best = price[stop], earlier[start]
                if rest is None:
                    continue
                total = rest + unevenness(start, stop)
                if best is None or total <= best:  # of equal ones the last: the longer stage
                    earlier[start], choice[start] = total, stop
        price = earlier
        choices.append(choice)
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return list(pairwise(cuts))
