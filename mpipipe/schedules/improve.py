"""The search for orders: priorities that are changed at random, and moves on the critical path, in turn.

    first      orders that are given, and priorities by rule: backwards before forwards by so much, later stages of a
               rank before earlier ones, or not
    repeat     search for a block that is repeated; see `cyclic` and `repeated_block`
    vary       of some good priorities change those of one kind or of some micro-batches; keep what is no worse
    rearrange  move actions of the best orders along the critical path; a worse one is taken now and then (annealing)

The priority of an action is the time at which it is meant to run: kinds at even distances are a repeated block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import product
from random import Random
from time import perf_counter
from typing import NamedTuple

from mpipipe.schedules.cyclic import Cycle
from mpipipe.schedules.kinds import NEVER, Ends, Form, Orders
from mpipipe.schedules.repeated_block import Block, Times

PATIENCES = (0.01, 0.5, 1.0)
EAGER = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)  # busy times by which a backward is put before its time
LATER_FIRST = (0.0, 1.0, -1.0, 3.0)  # busy times by which a later stage of a rank is put before its time
FAR = 1e6  # busy times by which a weight gradient is put off: it only fills
KEPT = 5  # good priorities that are varied
FIRST = 0.3  # share of the budget in which orders are varied and rearranged at first
REPEATED = 0.5  # share in which a repeated block is searched
NEAR = 0.01  # share of the bound by which a schedule may be longer without that
CYCLIC = 0.5  # share of that in which blocks of a given period are searched
CHANGE = 0.05  # steps that a change of such a block counts
FEW = 2  # micro-batches per rank for the others
VARIED = 0.7  # share of a round
SOME = 0.5  # share of changes to some micro-batches only, at the second time
WARM = 0.01  # busy times: how much longer a schedule may be that is taken on the way


class Budget:
    """How much a search may cost: seconds, and steps, each of which tries one order of all actions."""

    def __init__(self, seconds: float, steps: int | None = None) -> None:
        self.seconds, self.steps = seconds, math.inf if steps is None else steps
        self.begin, self.used = perf_counter(), 0.0

    def spent(self) -> float:
        """Return the share that is used up."""
        return max((perf_counter() - self.begin) / self.seconds, self.used / self.steps)

    def goes_on(self) -> bool:
        """Use one step; whether there was one left."""
        self.used += 1
        return self.used <= self.steps and self.spent() < 1


class Improvement:
    """The best orders of a form so far.

    Parameters
    ----------
    form : Form
        What is ordered.
    bound : float
        Where the search stops.
    budget : Budget
        Shared with other searches.
    random : Random
        Where changes come from.
    """

    def __init__(self, form: Form, bound: float, budget: Budget, random: Random) -> None:
        self.form, self.goal, self.budget, self.random = form, bound * (1 + 1e-9), budget, random
        self.makespan: float = NEVER
        self.orders: Orders = []
        self.good: list[tuple[float, Priorities]] = []

    def start(self, given: Iterable[Orders]) -> None:
        """Take orders, and priorities by rule: at least one, which keeps the limit, and more while there is time."""
        for ends in self.take_all(given):
            self.learn(ends)
        several = max(map(len, self.form.own)) > 1
        for rule in product(
            PATIENCES, EAGER, LATER_FIRST if several else (0.0,), (True, False) if several else (True,)
        ):
            if self.is_done() or (self.orders and self.budget.spent() >= 1):
                return
            self._try(self._by_rule(*rule))

    def take_all(self, given: Iterable[Orders]) -> list[Ends]:
        """Take those of the orders that keep the limit; return their ends."""
        found = []
        for orders in given:
            if all(map(self.form.fits, orders)):
                makespan, ends = self.form.replay(orders)
                self._take(makespan, orders)
                found.append(ends)
        return found

    def improve(self, until: float) -> None:
        """Vary and rearrange until so much of the budget is used up, or the bound is reached; twice.

        In between a repeated block is searched where the bound is still far.
        """
        begin = self.budget.spent()
        if self.is_done() or begin >= until:
            return
        far = begin + FIRST * (until - begin)
        for turn, (start, end) in enumerate(((begin, far), (far, until))):
            if turn and self.makespan > (1 + NEAR) * self.goal:
                start += REPEATED * (until - begin)
                self._repeat(start)
            self._vary(start + VARIED * (end - start), SOME * (turn > 0))
            self._rearrange(end)
            if self.is_done():
                return
            self.learn(self.form.replay(self.orders)[1])

    def is_done(self) -> bool:
        """Whether the bound is reached."""
        return self.makespan <= self.goal

    def learn(self, ends: Ends) -> None:
        """Take the times of a schedule as priorities, with weight gradients at theirs, or as fillers."""
        if all(len(of_kind) == self.form.microbatches for of_kind in ends):
            numbers = [[end - time for end in of_kind] for of_kind, time in zip(ends, self.form.seconds)]
            off = FAR * self.form.busy
            fillers = [[n + off for n in row] if kind % 3 == 2 else row for kind, row in enumerate(numbers)]
            for rows, patience in product((numbers, fillers), PATIENCES):
                self._try(Priorities(rows, patience, 0.0, False))

    def _take(self, makespan: float, orders: Orders) -> None:
        if makespan < self.makespan:
            self.makespan, self.orders = makespan, orders

    def _try(self, priorities: Priorities) -> float:
        self.budget.used += 1
        makespan, orders, _ = decide(self.form, priorities)
        if makespan < NEVER:
            self._take(makespan, orders)
            if all(abs(makespan - other) > 1e-9 * makespan for other, _ in self.good):
                self.good = sorted([*self.good, (makespan, priorities)], key=lambda each: each[0])[:KEPT]
        return makespan

    def _by_rule(self, patience: float, eager: float, later_first: float, reserved: bool) -> Priorities:
        form, time = self.form, 0.0
        first = [0.0] * len(form.seconds)
        for kind in form.chain():
            if kind % 3 != 2:
                time += form.lag[kind]
                later = form.own[form.rank[kind]].index(kind // 3)
                first[kind] = time - form.busy * (eager if kind % 3 else later_first * later)
                time += form.seconds[kind]
            else:
                first[kind] = time + FAR * form.busy
        numbers = [[begin + k * form.busy for k in range(form.microbatches)] for begin in first]
        return Priorities(numbers, patience, 0.0, reserved)

    def _vary(self, until: float, some: float) -> None:
        draw, form = self.random, self.form
        while self.good and not self.is_done() and self.budget.spent() < until:
            # at first all of them by turns: one that is stuck may be the best for long
            number = min(int(draw.expovariate(0.8)) if some else draw.randrange(KEPT), len(self.good) - 1)
            worst, (numbers, patience, ahead, reserved) = self.good[number]
            numbers = list(numbers)
            for _ in range(draw.choice((1, 1, 2, 3))):
                kind = draw.randrange(len(numbers))
                numbers[kind] = self._changed(kind, numbers, some)
            if draw.random() < 0.15:
                patience = draw.choice((0.01, 0.25, 0.5, 0.75, 1.0, 1.5))
            if draw.random() < 0.1:
                ahead = draw.choice((0.0, 0.0, 0.2, 0.5, 1.0)) * max(form.seconds)
            if draw.random() < 0.05:
                reserved = not reserved
            self.budget.used += 1
            varied = Priorities(numbers, patience, ahead, reserved)
            makespan, orders, _ = decide(form, varied)
            if makespan <= worst:
                self._take(makespan, orders)
                self.good[number] = (makespan, varied)
                self.good.sort(key=lambda each: each[0])

    def _changed(self, kind: int, numbers: list[list[float]], some: float) -> list[float]:
        """Return other priorities of one kind, for all or for some micro-batches in a row."""
        draw, row = self.random, list(numbers[kind])
        those = range(len(row))
        if draw.random() < some:
            begin = draw.randrange(len(row))
            those = those[begin : begin + draw.randrange(1, 8)]
        shift = draw.gauss(0, 1) * self.form.busy
        if kind % 3 == 2:
            off = FAR * self.form.busy if draw.random() < 0.3 else abs(shift)
            for k in those:
                row[k] = numbers[kind - 1][k] + off
        else:
            shift *= draw.choice((0.1, 0.3, 1, 3))
            for k in those:
                row[k] += shift
        return row

    def _repeat(self, until: float) -> None:
        """Search for repeated blocks, by a period and by how long few micro-batches take; take and learn them."""
        form, begin = self.form, self.budget.spent()
        middle = begin + CYCLIC * (until - begin)
        self._take_block(Cycle(form, self.random).search(self._share_until(middle, CHANGE)))
        few = min(form.microbatches, FEW * len(form.own))
        part = Block(Form(form.placement, few, form.costs, form.limit), self.random)
        self._take_block(part.search(part.earliest(), self._share_until(until, 1)))

    def _share_until(self, until: float, step: float) -> Callable[[], float]:
        """Return what uses a step, and tells how much is used up of what is left now."""
        begin = self.budget.spent()

        def share() -> float:
            self.budget.used += step
            return (self.budget.spent() - begin) / (until - begin) if until > begin else 1.0

        return share

    def _take_block(self, times: Times | None) -> None:
        if times is not None:
            for ends in self.take_all([Block(self.form, self.random).orders(times)]):
                self.learn(ends)

    def _rearrange(self, until: float) -> None:
        draw, form = self.random, self.form
        orders, makespan, moves = self.orders, self.makespan, None
        while not self.is_done() and self.budget.spent() < until:
            if moves is None:
                moves = critical_moves(form, orders, form.replay(orders)[1])
            if not moves:
                return
            changed = moved(form, orders, draw.choice(moves))
            self.budget.used += 1
            if changed is None:
                continue
            longer = form.replay(changed)[0] - makespan
            if longer <= 0 or draw.random() < math.exp(-longer / (WARM * (form.busy or 1.0))):
                orders, makespan, moves = changed, makespan + longer, None
                self._take(makespan, orders)


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


def critical_moves(form: Form, orders: Orders, ends: Ends) -> list[Move]:
    """List moves along one critical path, from its end to its begin."""
    place: list[list[int]] = [[] for _ in form.seconds]  # of each action of a kind its slot
    number: list[list[int]] = []  # of each slot its micro-batch
    for order in orders:
        number.append([])
        for slot, kind in enumerate(order):
            number[-1].append(len(place[kind]))
            place[kind].append(slot)
    rank = max(range(len(orders)), key=lambda each: ends[orders[each][-1]][-1])
    slot, moves = len(orders[rank]) - 1, []
    while True:
        order = orders[rank]
        kind, k = order[slot], number[rank][slot]
        start = ends[kind][k] - form.seconds[kind]
        if slot and ends[order[slot - 1]][number[rank][slot - 1]] >= start - 1e-9 * abs(start):
            moves += _ahead(order, rank, slot)
            slot -= 1
            continue
        before = form.waits_for[kind]
        if before < 0 or (not slot and not start):
            return moves
        rank, slot = form.rank[before], place[before][k]


def _ahead(order: list[int], rank: int, slot: int) -> list[Move]:
    """List the moves of one action: ahead of the one before it, and ahead of all up to one of its own kind."""
    earliest = slot
    while earliest and order[earliest - 1] != order[slot] and slot - earliest < FARTHEST:
        earliest -= 1
    return [Move(rank, slot, earlier) for earlier in sorted({slot - 1, earliest}) if earliest <= earlier < slot]


def moved(form: Form, orders: Orders, move: Move) -> Orders | None:
    """Return the orders after a move; None where it breaks the limit."""
    order = list(orders[move.rank])
    order.insert(move.earlier, order.pop(move.slot))
    if not form.fits(order):
        return None
    return [order if rank == move.rank else other for rank, other in enumerate(orders)]


# -- Orders from priorities: a rank takes of the actions whose input is there the one with the smallest number --------
#
# It runs a weight gradient where that has the smallest number, where it would wait for long, and where its memory is
# full. Time is that of `simulate`.


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
