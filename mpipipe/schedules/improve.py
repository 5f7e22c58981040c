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
from itertools import product
from random import Random
from time import perf_counter

from mpipipe.schedules.cyclic import Cycle
from mpipipe.schedules.kinds import NEVER, Ends, Form, Orders
from mpipipe.schedules.moves import critical_moves, moved
from mpipipe.schedules.priorities import Priorities, decide
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
