"""Recomputation put into a schedule: which forwards are run again, and when.

    rank 0 0F0 0F1 0R0 ........0B0---- 0F2 0R1 0B1---- 0R2 ....0B2----
    rank 1 ....1F0 1R0 1B0---- 1F1 1R1 1B1---- 1F2 1R2 1B2----

An R needs no message. So it fills the wait in front of its backward, wherever there is one.
"""

from __future__ import annotations

import math
import operator
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from mpipipe.errors import ArgumentError
from mpipipe.schedules import checks
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.proof import check
from mpipipe.schedules.replay import replay
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import (
    EQUAL_COSTS,
    Costs,
    Timeline,
    held,
    peak_memory,
    simulate,
    sizes_per_stage,
)

BACKWARDS = (BACKWARD, INPUT_GRAD)
Pair: TypeAlias = "tuple[int, int]"  # stage, unit
ROUNDING = 1e-9  # sums of sizes may be off by this share of the limit


def with_recompute(
    schedule: Schedule,
    costs: Costs = EQUAL_COSTS,
    memory_limit: float | None = None,
    *,
    activation: float | Sequence[float] = 1.0,
    kept_input: float | Sequence[float] = 0.0,
) -> Schedule:
    """Put R actions into a schedule, where memory asks for them, and leave the order of all else.

    An R stands just before its backward, or further ahead where its rank would idle, as far as
    memory allows. The result is never slower than with each of its R's just before the backward.
    ScheduleError or ArgumentError is raised where the schedule cannot run, no choice keeps the
    limit, or a cost or size does not fit.

    Parameters
    ----------
    schedule : Schedule
        A schedule with backwards. R's that it has are placed anew.
    costs : Costs, optional
        Times of the actions, from which waits follow; R takes as long as F.
    memory_limit : float, optional
        What a rank may hold at once, as `peak_memory` counts it. Those forwards are run again that
        keep it in the least time, of the choices that are tried; of equal choices the one with the
        fewest. Without a limit all are, and an R is moved ahead as long as its rank holds no more
        than one activation more than it must.
    activation, kept_input : float or sequence of float, optional
        As for `peak_memory`: by default the unit is one activation, and inputs are free.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.one_f_one_b(3, 4)
    >>> print(schedules.with_recompute(schedule, memory_limit=2).to_csv(), end="")
    0F0,0F1,0F2,0B0,0F3,0R1,0B1,0B2,0R3,0B3
    1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3
    2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
    """
    check(schedule)
    checks.limit(memory_limit)
    whole, inputs = sizes_per_stage(schedule, activation, kept_input)
    plain = schedule
    if schedule.recomputed:
        orders = []
        for order in schedule.orders:
            orders.append(tuple(filter(lambda action: action.op != RECOMPUTE, order)))
        plain = replace(schedule, orders=orders)
    if schedule.forwards_only:
        return plain
    everything = before_backwards(plain)
    timeline = simulate(plain, costs)
    least = peak_memory(everything, activation, kept_input)
    if memory_limit is None:
        limits = []
        for rank, peak in enumerate(least):
            largest = max(whole[stage] for stage in schedule.stages_of(rank))
            limits.append((peak + largest) * (1 + ROUNDING))
        return hidden_in_waits(everything, timeline, costs, limits, whole, inputs)[0]
    limit = memory_limit * (1 + ROUNDING)
    most = max(least)
    if not limit >= most:
        raise ArgumentError(
            "no choice of forwards to run again keeps this memory limit",
            found=f"memory_limit={memory_limit!r}",
            expected=f"at least {most:g}, which rank {least.index(most)} needs where it runs all "
            "of them again",
            remedy="raise the limit, or take a schedule that holds less, such as v_half or v_min",
        )
    freed = [*map(operator.sub, whole, inputs)]
    lives = [_lives(timeline, rank, freed) for rank in range(schedule.ranks)]
    results = []
    for preference in PREFERENCES:
        chosen: set[Pair] = set()
        for order, rank_lives in zip(plain.orders, lives):
            chosen |= _given_up(order, rank_lives, whole, limit, preference)
        recomputing = before_backwards(plain, chosen)
        limits = [limit] * schedule.ranks
        results.append(hidden_in_waits(recomputing, timeline, costs, limits, whole, inputs))
    return min(results, key=lambda result: (result[1], len(result[0].recomputed)))[0]


def before_backwards(schedule: Schedule, pairs: Collection[Pair] | None = None) -> Schedule:
    """Put an R just before the backward of these pairs, or of all. Existing R's stay."""
    orders = []
    for order in schedule.orders:
        actions = []
        for action in order:
            pair = action.stage, action.microbatch
            is_chosen = pairs is None or pair in pairs
            if action.op in BACKWARDS and is_chosen and pair not in schedule.recomputed:
                actions.append(action._replace(op=RECOMPUTE))
            actions.append(action)
        orders.append(tuple(actions))
    return replace(schedule, orders=orders)


class _Life(NamedTuple):
    """One activation of a rank: slots of its forward and backward, time of an R, what it frees."""

    begin: int
    end: int
    price: float
    freed: float


def _price_of_memory(life: _Life) -> tuple[float, float]:
    """Return the price for each unit of memory and time."""
    if not life.freed:
        return math.inf, -life.end
    return life.price / (life.freed * (life.end - life.begin)), -life.end


# What is given up first: the smallest of these. The first is the rule that needs the fewest where
# all activations are alike: the one whose backward is the furthest (Belady, IBM Systems Journal 5,
# 1966).
PREFERENCES: tuple[Callable[[_Life], tuple[float, float]], ...] = (
    lambda life: (-life.end, life.price),
    lambda life: (life.price, -life.end),
    _price_of_memory,
)


def _lives(timeline: Timeline, rank: int, freed: Sequence[float]) -> dict[Pair, _Life]:
    """List the activations of a rank; an R costs the time that waits do not hide."""
    begins: dict[Pair, int] = {}
    lives: dict[Pair, _Life] = {}
    before = 0.0
    for slot, ((stage, op, microbatch), start, end) in enumerate(timeline.spans[rank]):
        if op == FORWARD:
            begins[stage, microbatch] = slot
        elif op in BACKWARDS:
            again = timeline.duration(Action(stage, RECOMPUTE, microbatch))
            price = max(0.0, again - (start - before))
            life = _Life(begins[stage, microbatch], slot, price, freed[stage])
            lives[stage, microbatch] = life
        before = end
    return lives


def _given_up(
    order: Sequence[Action],
    lives: Mapping[Pair, _Life],
    whole: Sequence[float],
    limit: float,
    preference: Callable[[_Life], tuple[float, float]],
) -> set[Pair]:
    """Walk through an order; where it holds too much, choose activations to recompute."""
    now = 0.0
    chosen: set[Pair] = set()
    # Pairs that wait for their backwards; the first to be given up comes first.
    waiting: list[tuple[tuple[float, float], Pair]] = []
    for slot, (stage, op, microbatch) in enumerate(order):
        pair = stage, microbatch
        if op == FORWARD and pair in lives:
            now += whole[stage]
        elif op in BACKWARDS and pair in chosen:
            now += lives[pair].freed
        while now > limit:
            _, other = heappop(waiting)
            if lives[other].end > slot:
                chosen.add(other)
                now -= lives[other].freed
        if op == FORWARD and pair in lives:
            heappush(waiting, (preference(lives[pair]), pair))
        elif op in (BACKWARD, WEIGHT_GRAD):
            now -= whole[stage]
    return chosen


# -- Recomputations moved ahead, into time in which their rank would wait --------------------------


SHARES = (1.0, 0.5, 0.01)  # an R is moved into a wait that is at least this share of its time
MOST_PASSES = 8  # each pass simulates; few passes after the second find anything


#     before   F1 ....... F2  R0 B0        an R that costs time, and a wait of its rank before that
#     after    F1 R0 .... F2  B0           its activation is held for longer
def hidden_in_waits(
    schedule: Schedule,
    timeline: Timeline,
    costs: Costs,
    limits: Sequence[float],
    whole: Sequence[float],
    kept: Sequence[float],
) -> tuple[Schedule, float]:
    """Return the fastest schedule that is found by moving R's ahead into waits, and its makespan.

    An R that fits into a wait delays no action, so moving it cannot make the schedule slower. If it
    does not fit, the simulation decides. `timeline` says how long actions take,
    `limits` what each rank may hold; `whole` and `kept` are those of `held`.
    """
    transfer = costs.per_stage("transfer", schedule.stages)
    freed = [*map(operator.sub, whole, kept)]

    def replayed(schedule: Schedule) -> tuple[list[array[float]], list[float]]:
        return replay(schedule, timeline.durations, transfer, timeline.shares)[:2]

    best = schedule
    starts, ends = replayed(best)
    for share in SHARES:
        for _ in range(MOST_PASSES):
            orders = [*best.orders]
            for rank, order in enumerate(best.orders):
                line = _Waits(order, starts[rank], [*map(timeline.duration, order)])
                places = line.places(share)
                if places:
                    memory = list(held(schedule, order, whole, kept))
                    orders[rank] = line.moved(share, places, memory, freed, limits[rank])
            changed = replace(schedule, orders=orders)
            if changed == best:
                break
            began, ended = replayed(changed)
            if max(ended) >= max(ends):
                break
            best = changed
            starts = began
            ends = ended
    return best, max(ends)


class _Waits:
    """The actions of one rank on the line of time: when each one starts, and how long it takes."""

    def __init__(
        self, order: Sequence[Action], starts: Sequence[float], seconds: Sequence[float]
    ) -> None:
        self.order = order
        self.seconds = seconds
        ends = [0.0, *map(operator.add, starts, seconds)]
        self.waits = list(map(operator.sub, starts, ends))  # before each action

    def places(self, share: float) -> dict[int, int]:
        """Find R's that cost time and might move into an earlier wait: R's slot -> forward's slot.

        An R costs no time if a wait at least as long follows it.
        """
        order = self.order
        waits = self.waits
        seconds = self.seconds
        waiting: list[int] = []  # slots so far in front of which the rank waits
        forwards: dict[tuple[int, int], int] = {}
        moves = {}
        for slot, (stage, op, microbatch) in enumerate(order):
            if op == FORWARD:
                forwards[stage, microbatch] = slot
            elif op == RECOMPUTE and waits[slot + 1] < seconds[slot]:
                begin = forwards[stage, microbatch]
                for earlier in waiting[bisect_right(waiting, begin) :]:
                    if waits[earlier] >= share * seconds[slot]:
                        moves[slot] = begin
            if waits[slot] > 0:
                waiting.append(slot)
        return moves

    def moved(
        self,
        share: float,
        places: dict[int, int],
        memory: list[float],
        freed: Sequence[float],
        limit: float,
    ) -> tuple[Action, ...]:
        """Return the order with R's moved into the waits, as far as memory allows.

        `memory` is what the rank holds during each action, `freed` what an R of each stage adds.
        """
        ahead: dict[int, list[Action]] = defaultdict(list)  # slot -> R's moved to before it
        left = dict(places)
        for slot, wait in enumerate(self.waits):
            if wait <= 0:
                continue
            for source, forward in [*left.items()]:
                if not forward < slot < source:
                    continue
                seconds = self.seconds[source]
                more = freed[self.order[source].stage]
                if wait < share * seconds or max(memory[slot:source]) + more > limit:
                    break
                wait -= seconds
                ahead[slot].append(self.order[source])
                del left[source]
                for later in range(slot, source):
                    memory[later] += more
        order: list[Action] = []
        for slot, action in enumerate(self.order):
            order += ahead[slot]
            if slot in left or slot not in places:
                order.append(action)
        return tuple(order)
