"""Simulated annealing, which now and then keeps what is a little worse, and moves of single actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from time import perf_counter
from typing import NamedTuple, TypeVar

from mpipipe.schedules.search.problem import Ends, OrderProblem, Orders

State = TypeVar("State")
Share = Callable[[], float]  # uses a step, and returns the share of a budget that is used up


class Budget:
    """How much a search may cost: seconds, and steps; a step tries one order of all actions."""

    def __init__(self, seconds: float, steps: int | None = None) -> None:
        self.seconds, self.steps = seconds, math.inf if steps is None else steps
        self.begin, self.used = perf_counter(), 0.0

    def spent(self) -> float:
        """Return the share that is used up."""
        return max((perf_counter() - self.begin) / self.seconds, self.used / self.steps)

    def until(self, end: float, step: float = 1.0) -> Share:
        """Return the share of what is left now until `end`; each call uses `step` steps."""
        begin = self.spent()

        def share() -> float:
            self.used += step
            return (self.spent() - begin) / (end - begin) if end > begin else 1.0

        return share


def anneal(
    state: State,
    energy: float,
    changed: Callable[[State], tuple[State, float] | None],
    share: Share,
    random: Random,
    hot: float,
    cold: float,
) -> Iterator[tuple[State, float]]:
    """Yield the states that are taken, and their energies, until the budget is used up.

    `changed` returns another state and its energy, None where the change is not allowed. `hot` and `cold` are the
    energies by which a step may be worse, first and last.
    """
    while (used := share()) < 1:
        trial = changed(state)
        if trial is None:
            continue
        worse = trial[1] - energy
        if worse <= 0 or random.random() < math.exp(-worse / (hot * (cold / hot) ** used)):
            state, energy = trial
            yield trial


# -- Orders made better by moves: an action of the critical path goes ahead of others of its rank ---------------------
#
# The critical path is the chain of actions that makes the schedule as long as it is: each one begins when the one
# before it ends, on its rank or by a message. No order is faster unless two of its actions on one rank change places.


FARTHEST = 12  # an action goes ahead of so many others at most


class Move(NamedTuple):
    """Take the action at one slot of a rank, and put it at an earlier one."""

    rank: int
    slot: int
    earlier: int


def critical_moves(problem: OrderProblem, orders: Orders, ends: Ends) -> list[Move]:
    """List moves along one critical path, from its end to its begin."""
    place: list[list[int]] = [[] for _ in problem.seconds]  # of each run of a task its slot
    number: list[list[int]] = []  # of each slot its micro-batch
    for order in orders:
        number.append([])
        for slot, task in enumerate(order):
            number[-1].append(len(place[task]))
            place[task].append(slot)
    rank = max(range(len(orders)), key=lambda rank: ends[orders[rank][-1]][-1])
    slot, moves = len(orders[rank]) - 1, []
    while True:
        order = orders[rank]
        task, k = order[slot], number[rank][slot]
        start = ends[task][k] - problem.seconds[task]
        if slot and ends[order[slot - 1]][number[rank][slot - 1]] >= start - 1e-9 * abs(start):
            moves += _ahead(order, rank, slot)
            slot -= 1
            continue
        before = problem.waits_for[task]
        if before < 0 or (not slot and not start):
            return moves
        rank, slot = problem.rank[before], place[before][k]


def _ahead(order: list[int], rank: int, slot: int) -> list[Move]:
    """List the moves of one action: ahead of the one before it, and ahead of all up to one of its own task."""
    earliest = slot
    while earliest and order[earliest - 1] != order[slot] and slot - earliest < FARTHEST:
        earliest -= 1
    return [Move(rank, slot, earlier) for earlier in sorted({slot - 1, earliest}) if earliest <= earlier < slot]


def moved(problem: OrderProblem, orders: Orders, move: Move) -> Orders | None:
    """Return the orders after a move; None where it breaks the limit."""
    order = list(orders[move.rank])
    order.insert(move.earlier, order.pop(move.slot))
    if problem.peak(order) > problem.limit:
        return None
    return [order if rank == move.rank else other for rank, other in enumerate(orders)]
