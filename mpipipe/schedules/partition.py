"""Cut a chain of layers into stages: the slowest as fast as possible, the others even."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Rational

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from mpipipe.schedules.checks import at_least_one
from mpipipe.schedules.schedule import Schedule
from mpipipe.text import counted


def partition(costs: Iterable[float | Fraction], stages: int) -> list[tuple[int, int]]:
    """Cut layers into contiguous stages such that the most expensive stage is as cheap as possible.

    Many cuts reach that cost. Among them the sum of squared stage costs decides, then the sum of
    squared stage sizes; the least one is taken. Of equal cuts the one with the longer stages first
    is taken: ten equal layers in three stages are 4, 3, 3. All sums are exact, so that rounding
    does not decide. No stage is empty: ArgumentError is raised for more stages than layers, for
    none, and for a cost that is negative or not finite.

    Parameters
    ----------
    costs : iterable of float
        One number per layer, at least 0.
    stages : int
        Number of stages, from 1 to the number of layers.

    Returns
    -------
    list of (int, int)
        Start and stop of each stage's layers.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedules.partition([4, 1, 1, 1, 1, 4], 3)
    [(0, 1), (1, 5), (5, 6)]
    """
    stages = at_least_one("stages", stages)
    units = _whole_numbers(list(costs))
    if len(units) < stages:
        raise ArgumentError(
            "fewer layers than stages",
            found=f"{counted(len(units), 'layer')} for {counted(stages, 'stage')}",
            expected="at least one layer per stage",
            remedy="use fewer ranks or chunks, or more layers",
        )
    # The cost of the layers ahead of each layer.
    before = list(accumulate(units, initial=0))
    return _most_even(before, stages, _bottleneck(before, stages, max(units)))


def _whole_numbers(costs: Sequence[float | Fraction]) -> list[int]:
    """Scale the costs to integers: every float is a fraction, and integers add without rounding."""
    fractions = []
    unit = 1
    for layer, cost in enumerate(costs):
        try:
            if isinstance(cost, Rational):
                fractions.append(Fraction(cost))
            else:
                fractions.append(Fraction(float(cost)))
        except (TypeError, ValueError, OverflowError):
            fractions.append(Fraction(-1))
        if fractions[-1] < 0:
            raise ArgumentError(
                f"the cost of layer {layer} is not usable",
                found=f"{cost!r}",
                expected="a finite number of at least 0",
            )
        unit = math.lcm(unit, fractions[-1].denominator)
    return [int(fraction * unit) for fraction in fractions]


def _bottleneck(before: list[int], stages: int, low: int) -> int:
    """Find by bisection the least cost of the most expensive stage, which is at least `low`."""
    high = before[-1]
    while low < high:
        limit = (low + high) // 2
        reached = 0
        for _ in range(stages):
            reached = _stop(before, reached, limit)
        if reached == len(before) - 1:
            high = limit
        else:
            low = limit + 1
    return low


def _stop(before: list[int], start: int, limit: int) -> int:
    """Return where a stage from a layer on ends at the latest within a limit of its cost."""
    return bisect_right(before, before[start] + limit) - 1


def _most_even(before: list[int], stages: int, bottleneck: int) -> list[tuple[int, int]]:
    """Find the most even cut among those without a stage above `bottleneck`."""
    layers = len(before) - 1
    scale = layers * layers + 1  # more than any sum of squared sizes: cost decides first

    def unevenness(start: int, stop: int) -> int:
        return (before[stop] - before[start]) ** 2 * scale + (stop - start) ** 2

    # From the back: of the layers start.. in 0, 1, ... stages, if they fit, the price and minus the
    # first stop. Of equal prices the least of these is taken: the longer stage.
    tables: list[dict[int, tuple[int, int]]] = [{layers: (0, -layers)}]
    for _ in range(stages):
        rest = tables[-1]
        table = {}
        for start in range(layers):
            cuts = []
            for stop in range(start + 1, _stop(before, start, bottleneck) + 1):
                if stop in rest:
                    cuts.append((rest[stop][0] + unevenness(start, stop), -stop))
            if cuts:
                table[start] = min(cuts)
        tables.append(table)
    starts = [0]
    for table in tables[:0:-1]:
        starts.append(-table[starts[-1]][1])
    return list(pairwise(starts))


# -- Schedules of models of which a part is frozen -------------------------------------------------


#     stage 0  frozen     F0 F1 F2 .  .  .              nothing below it is trained: no backward
#     stage 1  trained    .  F0 F1 B0 F2 B1 ...         its gradient of the input is not sent
#     stage 2  frozen     .  .  F0 B0 F1 B1 ...         B, the gradient of the input alone
def with_frozen(schedule: Schedule, frozen: Collection[int]) -> Schedule:
    """Take out of a schedule what frozen stages do not need, and leave the order of all else.

    A frozen stage has nothing to train. Its W actions vanish, and its I actions are backwards in
    one piece, B, at the same place. The frozen stages before the first one that is trained have no
    backward at all, and no gradient comes to them over skips. The result needs no longer than the
    given one, where `Costs.weight_grad` is 0 for frozen stages: their B has the gradient of the
    input alone, and the simulation counts B as both.

    Parameters
    ----------
    schedule : Schedule
        A schedule with backwards.
    frozen : collection of int
        Logical stages without a parameter that is trained: some, and not all.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.with_frozen(schedules.zero_bubble_h1(3, 1), {0, 2}).to_csv(), end="")
    0F0
    1F0,1I0,1W0
    2F0,2B0
    """
    stages = set(range(schedule.stages))
    if not set(frozen) < stages:
        raise ArgumentError(
            "frozen stages do not fit the schedule",
            found=f"frozen {sorted(frozen)} of {counted(schedule.stages, 'stage')}",
            expected="some of the stages, and not all of them",
            remedy="leave something to train",
        )
    first = min(stages.difference(frozen))
    orders = []
    for order in schedule.orders:
        actions = []
        for action in order:
            stage, op, _ = action
            if stage in frozen and op == INPUT_GRAD:
                action = action._replace(op=BACKWARD)
            vanishes = stage < first or (stage in frozen and op == WEIGHT_GRAD)
            if op == FORWARD or not vanishes:
                actions.append(action)
        orders.append(tuple(actions))
    return replace(schedule, orders=orders, trained_from=first)
