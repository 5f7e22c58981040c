"""A schedule as few numbers: what it has to order, and for each rank the kinds of its actions, one after the other.

    kind 3 * stage + 0 F, + 1 I, + 2 W          the k-th action of a kind is that of micro-batch k

Micro-batches are alike, so each kind may run in their order: give the k-th start of each kind to micro-batch k. Every
message, every wait for an own action and the number of activations are as good as before: where each b_k comes at
least a time after a_k, the k-th smallest b comes at least that time after the k-th smallest a.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, repeat
from numbers import Real
from typing import Any

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs

OPS = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
NEVER = math.inf
Orders = list[list[int]]  # of each rank: kinds
Ends = list[list[float]]  # of each kind: when its actions end


class Form:
    """Stages on ranks, micro-batches, times and memory: all but the orders.

    Attributes
    ----------
    seconds : of each kind
    rank : of each kind
    waits_for, lag : of each kind the kind whose action of the same micro-batch comes before it, -1 for none, and how
        long its message takes
    heard_by : of each kind the F or I that waits for it, -1 for none
    own : of each rank its stages, ascending
    limit : activations that a rank may hold at once; no more than there are
    busy : of the busiest rank for one micro-batch
    """

    def __init__(self, placement: Sequence[int], microbatches: int, costs: Costs, memory_limit: float | None) -> None:
        stages = len(placement)
        self.placement, self.microbatches, self.costs = tuple(placement), microbatches, costs
        self.own = [[s for s in range(stages) if placement[s] == rank] for rank in range(max(placement) + 1)]
        self.limit = whole_limit(placement, microbatches, memory_limit)
        times = [costs.per_stage(name, stages) for name in ("forward", "input_grad", "weight_grad")]
        self.seconds = [time for stage in zip(*times) for time in stage]
        self.rank = [placement[kind // 3] for kind in range(3 * stages)]
        hop = hops(placement, costs)
        self.waits_for, self.lag = [-1] * (3 * stages), [0.0] * (3 * stages)
        for stage in range(stages):
            forward, input_grad, weight_grad = range(3 * stage, 3 * stage + 3)
            self.waits_for[forward], self.lag[forward] = (forward - 3 if stage else -1), hop[stage]
            last = stage == stages - 1
            self.waits_for[input_grad] = forward if last else input_grad + 3
            self.lag[input_grad] = 0.0 if last else hop[stage + 1]
            self.waits_for[weight_grad] = input_grad
        self.heard_by = [-1] * (3 * stages)
        for kind, before in enumerate(self.waits_for):
            if before >= 0 and kind % 3 != 2:
                self.heard_by[before] = kind
        self.busy = max(math.fsum(sum(self.seconds[3 * s : 3 * s + 3]) for s in stages) for stages in self.own)

    def chain(self) -> list[int]:
        """List the kinds such that each one comes after the one it waits for."""
        stages = range(len(self.placement))
        return [3 * s for s in stages] + [kind for s in reversed(stages) for kind in (3 * s + 1, 3 * s + 2)]

    def replay(self, orders: Orders) -> tuple[float, Ends]:
        """Return the makespan, NEVER where the ranks stand still, and the ends."""
        waits_for, lag, seconds = self.waits_for, self.lag, self.seconds
        ends: Ends = [[] for _ in seconds]
        slots, clocks = [0] * len(orders), [0.0] * len(orders)
        asleep: dict[int, int] = {}  # the kind that a rank waits for -> the rank
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            order, slot, now = orders[rank], slots[rank], clocks[rank]
            while slot < len(order):
                kind = order[slot]
                own, before = ends[kind], waits_for[kind]
                if before >= 0:
                    done = ends[before]
                    if len(done) <= len(own):
                        asleep[before] = rank
                        break
                    now = max(now, done[len(own)] + lag[kind])
                now += seconds[kind]
                own.append(now)
                if kind in asleep and len(own) > len(ends[self.heard_by[kind]]):
                    ready.append(asleep.pop(kind))
                slot += 1
            slots[rank], clocks[rank] = slot, now
        whole = all(slot == len(order) for slot, order in zip(slots, orders))
        return (max(clocks) if whole else NEVER), ends

    def fits(self, order: Sequence[int]) -> bool:
        """Whether the order of a rank keeps the limit."""
        held = 0
        for kind in order:
            if kind % 3 == 0:
                held += 1
                if held > self.limit:
                    return False
            elif kind % 3 == 2:
                held -= 1
        return True

    def schedule(self, name: str, orders: Orders) -> Schedule:
        """Write the kinds out as actions."""
        every = list(range(self.microbatches))  # large schedules share these numbers
        of_kind = [map(Action, repeat(kind // 3), repeat(OPS[kind % 3]), every) for kind in range(len(self.seconds))]
        with _collector_paused():
            written = tuple(tuple([next(of_kind[kind]) for kind in order]) for order in orders)
        return Schedule(name, self.placement, self.microbatches, written)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python from looking for cycles among millions of new actions again and again: they have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def kinds_of(schedule: Schedule) -> Orders:
    """List the kinds of a schedule's actions; a B is an I and a W."""
    orders = []
    for order in schedule.orders:
        kinds = []
        for stage, op, _ in order:
            kinds += [3 * stage + 1, 3 * stage + 2] if op == BACKWARD else [3 * stage + OPS.index(op)]
        orders.append(kinds)
    return orders


def hops(placement: Sequence[int], costs: Costs) -> list[float]:
    """Give the time from stage l-1 to stage l or back: nothing where both lie on one rank."""
    transfer = costs.per_stage("transfer", len(placement))
    return [0.0] + [cost if a != b else 0.0 for (a, b), cost in zip(pairwise(placement), transfer[1:])]


def whole_limit(placement: Sequence[int], microbatches: int, memory_limit: float | None) -> int:
    """Give a limit as a number of activations, no more than there are; refuse one that no schedule keeps."""
    least = max(map(list(placement).count, set(placement)), default=1)
    memory_limit = limit(memory_limit)
    if memory_limit is not None and not memory_limit >= least:
        raise ArgumentError(
            "no schedule keeps this memory limit",
            found=f"memory_limit={memory_limit}",
            expected=f"at least {least}",
            remedy="a rank holds the activations of one micro-batch in all of its stages",
        )
    most = least * microbatches
    return most if memory_limit is None else math.floor(min(memory_limit, most))


# -- Arguments that have to be numbers --------------------------------------------------------------------------------


def number(name: str, value: Any) -> Any:
    """Return `value`; refuse what is no number, with the argument's name. True, text and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ArgumentError(f"{name} is no number", found=f"{name}={value!r}", expected="a number such as 4 or 2.5")
    return value


def limit(memory_limit: Any) -> Any:
    """Return a limit of memory, None if there is none; refuse what is no number."""
    return None if memory_limit is None else number("memory_limit", memory_limit)


def check_time(seconds: Any) -> None:
    """Raise ArgumentError if there is no time to search."""
    if not 0 < number("seconds", seconds) < math.inf:
        raise ArgumentError("no time to search", found=f"seconds={seconds}", expected="a finite number above 0")
