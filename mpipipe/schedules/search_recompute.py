"""The best schedule that can be found where forwards may be run again to keep a limit of memory.

An order that holds more than the limit may be the faster one, although some of its forwards are run again: waits hide
them. So orders are searched for several limits above the given one, `with_recompute` brings each within it, and the
fastest counts. Schedules of the package compete, and the search without any R. Of the fastest single actions are moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from mpipipe.errors import ArgumentError
from mpipipe.schedules import given
from mpipipe.schedules.action import BACKWARD, FORWARD, Action
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.improve import Budget
from mpipipe.schedules.improve_recompute import Annealing
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
    microbatches, limit = at_least_one("microbatches", microbatches), given.number("memory_limit", memory_limit)
    given.check_time(seconds)
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
