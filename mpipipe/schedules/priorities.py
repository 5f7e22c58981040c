"""Orders from priorities: a rank takes of the actions whose input is there the one with the smallest number.

It runs a weight gradient where that has the smallest number, where it would wait for long, and where its memory is
full. Time is that of `simulate`.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from mpipipe.schedules.kinds import NEVER, Ends, Form, Orders


class Priorities(NamedTuple):
    """What a run is made from.

    Attributes
    ----------
    numbers : of each kind one for each micro-batch, the smallest first
    patience : share of a W that a rank waits rather than begin the W
    ahead : how long before its input is there an action is chosen among the others
    reserved : whether a forward leaves an activation for each later stage of its rank; then the run always ends
    """

    numbers: list[list[float]]
    patience: float
    ahead: float
    reserved: bool


def decide(form: Form, priorities: Priorities) -> tuple[float, Orders, Ends]:
    """Return makespan, orders and ends; the makespan is NEVER where memory is full of what cannot go on."""
    return _Run(form, priorities).run()


class _Run:
    """The state of one run."""

    def __init__(self, form: Form, priorities: Priorities) -> None:
        self.form, self.priorities = form, priorities
        self.ends: Ends = [[] for _ in form.seconds]
        self.held = [0] * len(form.own)
        self.room = [form.limit] * len(form.seconds)  # of an F: activations that may be held when it has begun
        self.urgent = [[kind for stage in own for kind in (3 * stage, 3 * stage + 1)] for own in form.own]
        self.weights = [[3 * stage + 2 for stage in own] for own in form.own]
        if priorities.reserved:
            for own in form.own:
                for later, stage in enumerate(reversed(own)):
                    self.room[3 * stage] = max(1, form.limit - later)

    def run(self) -> tuple[float, Orders, Ends]:
        form, ends = self.form, self.ends
        orders: Orders = [[] for _ in form.own]
        free = [(0.0, rank) for rank in range(len(orders))]
        asleep: dict[int, float] = {}  # ranks for which nothing is known to become ready, and since when
        makespan, left = 0.0, len(form.seconds) * form.microbatches
        while free:
            now, rank = heappop(free)
            kind, start = self._choose(rank, now)
            if kind < 0:
                asleep[rank] = now
                continue
            end = start + form.seconds[kind]
            ends[kind].append(end)
            orders[rank].append(kind)
            heappush(free, (end, rank))
            makespan, left = max(makespan, end), left - 1
            self.held[rank] += (1, 0, -1)[kind % 3]
            listener = form.heard_by[kind]
            if listener >= 0 and form.rank[listener] in asleep:
                other = form.rank[listener]
                heappush(free, (max(asleep.pop(other), start), other))
        return (NEVER if left else makespan), orders, ends

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return what a rank does next, and when it begins; -1 where nothing is known."""
        form, ends = self.form, self.ends
        numbers, patience, ahead, _ = self.priorities
        held, soonest, next_kind, full = self.held[rank], NEVER, -1, False
        best, best_number, best_ready = -1, NEVER, now
        for kind in self.urgent[rank]:
            k = len(ends[kind])
            if k == form.microbatches:
                continue
            ready, before = 0.0, form.waits_for[kind]
            if before >= 0:
                if len(ends[before]) <= k:
                    continue
                ready = ends[before][k] + form.lag[kind]
            if kind % 3 == 0 and held >= self.room[kind]:
                full = True
                continue
            if ready <= now + ahead and numbers[kind][k] < best_number:
                best, best_number, best_ready = kind, numbers[kind][k], ready
            if ready < soonest:
                soonest, next_kind = ready, kind
        weight, weight_number = -1, NEVER
        for kind in self.weights[rank]:
            k = len(ends[kind])
            if k < len(ends[kind - 1]) and numbers[kind][k] < weight_number:
                weight, weight_number = kind, numbers[kind][k]
        worth = patience * form.seconds[weight]
        if best >= 0 and (weight < 0 or best_number <= weight_number):
            if best_ready <= now or weight < 0 or best_ready - now < worth:
                return best, max(now, best_ready)
        if weight >= 0 and (best >= 0 or full or soonest - now >= worth):
            return weight, now
        return next_kind, max(now, soonest)
