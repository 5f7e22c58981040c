"""The best schedule that can be found for given costs and memory.

It begins with all schedules of the package that keep the limit, so it is never slower than one of them. For many
micro-batches the search is made with few of them; what they do in the middle is repeated, and the begin and the end are
kept (Lin et al. 2023, Tessel, arXiv:2311.15269). Orders are changed in turn:

    first      orders that are known, and priorities by rule: backwards before forwards by so much, later stages of a
               rank before earlier ones, or not
    repeat     search for a block that is repeated; see `blocks`
    vary       of some good priorities change those of one task or of some micro-batches; keep what is no worse
    rearrange  move actions of the best orders along the critical path; a worse one is taken now and then (annealing)

The priority of an action is the time at which it is meant to run: tasks at even distances are a repeated block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

from mpipipe.errors import ArgumentError
from mpipipe.schedules import building_blocks, classic, zero_bubble
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, changed
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.checks import at_least_one, check_time, counts
from mpipipe.schedules.schedule import Schedule, looped_placement
from mpipipe.schedules.search.anneal import Budget, anneal, critical_moves, moved
from mpipipe.schedules.search.blocks import BlockSearch, orders_of
from mpipipe.schedules.search.orders import Priorities, decide
from mpipipe.schedules.search.problem import NEVER, Ends, OrderProblem, Orders, tasks_of, whole_limit
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, simulate
from mpipipe.schedules.slices import in_slices

MANY, FEW = 4, 3  # micro-batches per rank: more are made from so many
REPEATING = 0.6  # share of the budget for the repeated part


def search(
    placement: int | Sequence[int],
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    *,
    chunks: int = 1,
    memory_limit: float | None = None,
    slices: int = 1,
    seconds: float = 10.0,
    steps: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Search for the fastest schedule; stop where none can be faster.

    Backwards are split into I and W. The result is not slower than any schedule of this package with the same stages on
    the same ranks that keeps the limit. `gap` tells how far it is from the best. Its name is "search". With slices an
    order of M n whole micro-batches is searched, for mean slices, and then cut. ArgumentError is raised where a count
    is below 1, a cost does not fit, no schedule keeps the limit, or there is no time.

    Parameters
    ----------
    placement : int or sequence of int
        The number of ranks P, or the rank of each stage. For a number of ranks with two chunks the stages loop over the
        ranks or lie on a V, whichever is faster.
    microbatches : int
        M, at least 1.
    costs : Costs, optional
        Times of the stages; by default one unit for each of F, I and W.
    chunks : int, optional
        V, stages per rank, where `placement` is a number of ranks.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, at least its number of stages times the slices of a sequence; by
        default there is no limit.
    slices : int, optional
        n, slices of each sequence. Activations are those of slices then.
    seconds, steps : float and int, optional
        Time to search, on one core, and orders to try; where these end before the time, the result is the same on every
        machine.
    seed : int, optional
        Where the changes begin that are drawn at random.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> costs = schedules.Costs(forward=[1, 1, 1, 1.5], transfer=0.1)
    >>> found = schedules.search(4, 8, costs, memory_limit=4, seconds=60, steps=200)
    >>> schedules.gap(found, costs, memory_limit=4).share < 0.03
    True
    """
    microbatches, slices = counts(microbatches=microbatches, slices=slices)
    check_time(seconds)
    if slices > 1:
        options = dict(chunks=chunks, seconds=seconds, steps=steps, seed=seed)
        return _of_slices(placement, microbatches, costs, memory_limit, slices, options)
    budget, random = Budget(seconds, None if steps is None else at_least_one("steps", steps)), Random(seed)
    best: Improvement | None = None
    bounds = [(least_time(place, microbatches, costs, memory_limit), place) for place in placements(placement, chunks)]
    for number, (bound, place) in enumerate(sorted(bounds)):
        if best is None or bound < best.makespan:
            problem = OrderProblem(place, microbatches, costs, memory_limit)
            tried = _searched(problem, costs, Improvement(problem, bound, budget, random), (number + 1) / len(bounds))
            if best is None or tried.makespan < best.makespan:
                best = tried
    assert best is not None
    best.improve(1.0)  # with what is left where a placement cannot be faster
    return best.problem.schedule("search", best.orders)


def _of_slices(
    placement: int | Sequence[int],
    microbatches: int,
    costs: Costs,
    memory_limit: float | None,
    slices: int,
    options: dict[str, Any],
) -> Schedule:
    """Search with whole micro-batches in the places of slices; return the fastest schedule that keeps the limit."""
    units, mean, places = microbatches * slices, costs.of_mean_slice(), placements(placement, options["chunks"])
    limits = [whole_limit(place, units, memory_limit, slices) for place in places]
    more = (slices - 1) * whole_limit(places[0], 1, None)  # held before the first backward
    room = None if memory_limit is None else memory_limit - more
    whole = [search(placement, units, mean, memory_limit=room, **options)]
    for place, limit in zip(places, limits):
        whole += published(place, units, mean, max(1, limit - more))
    made = [one_by_one(place, microbatches, slices) for place in places]
    made += [in_slices(schedule, slices) for schedule in whole]
    made = [replace(schedule, orders=changed(schedule.orders, with_split_backwards)) for schedule in made]
    found = [(simulate(schedule, costs), schedule) for schedule in made]
    fitting = [pair for pair in found if max(pair[0].peak_activations) <= max(limits)]
    return replace(min(fitting, key=lambda pair: pair[0].makespan)[1], name="search")


def with_split_backwards(order: Sequence[Action]) -> list[Action]:
    """Return an order with an I and a W in the place of each B."""
    halves = (INPUT_GRAD, WEIGHT_GRAD)
    return [action._replace(op=op) for action in order for op in (halves if action.op == BACKWARD else (action.op,))]


def one_by_one(place: Sequence[int], microbatches: int, slices: int = 1) -> Schedule:
    """Return the schedule that needs the least memory: each micro-batch goes forth and back before the next one."""
    ways = [(stage, FORWARD) for stage in range(len(place))]
    ways += [(stage, BACKWARD) for stage in reversed(range(len(place)))]
    orders = tuple(
        tuple(
            Action(stage, op, number * slices + part)
            for number in range(microbatches)
            for stage, op in ways
            if place[stage] == rank
            for part in (range(slices) if op == FORWARD else reversed(range(slices)))
        )
        for rank in range(max(place) + 1)
    )
    return Schedule("one_by_one", tuple(place), microbatches, orders, slices=slices)


def published(placement: Sequence[int], microbatches: int, costs: Costs, limit: float) -> Iterator[Schedule]:
    """Yield the package's schedules of training with these stages on these ranks; some may not keep the limit."""
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    if tuple(placement) == looped_placement(ranks, chunks):
        yield classic.interleaved_1f1b(ranks, chunks, microbatches)
        yield classic.looped_bfs(ranks, chunks, microbatches)
        yield zero_bubble.interleaved_zero_bubble(ranks, chunks, microbatches)
        if chunks == 1:
            yield classic.gpipe(ranks, microbatches)
            yield classic.one_f_one_b(ranks, microbatches)
            yield building_blocks.zero_bubble_2p(ranks, microbatches, costs, limit)
    if tuple(placement) == zero_bubble.v_placement(ranks):
        yield zero_bubble.dualpipe_v(ranks, microbatches)
        for build in (zero_bubble.zero_bubble_v, building_blocks.v_half, building_blocks.v_min):
            yield build(ranks, microbatches, costs)
            yield build(ranks, microbatches)


def placements(placement: int | Sequence[int], chunks: int) -> list[tuple[int, ...]]:
    """Return the placements to search, for a number of ranks or the ranks of stages."""
    if not isinstance(placement, Sequence):
        ranks, chunks = at_least_one("ranks", placement), at_least_one("chunks", chunks)
        looped = looped_placement(ranks, chunks)
        return list(dict.fromkeys([looped, zero_bubble.v_placement(ranks)])) if chunks == 2 else [looped]
    named = set(placement)
    if not named or named != set(range(len(named))):
        raise ArgumentError(
            "the placement does not name ranks from 0 without a gap",
            found=f"{placement}",
            expected="as in (0, 1, 1, 0)",
        )
    return [tuple(placement)]


def _searched(problem: OrderProblem, costs: Costs, whole: Improvement, until: float) -> Improvement:
    """Search one placement: as it is, or with few micro-batches first."""
    place, limit, few = problem.placement, problem.limit, FEW * len(problem.own)
    orders = [tasks_of(schedule) for schedule in published(place, problem.microbatches, costs, limit)]
    if problem.microbatches <= MANY * len(problem.own):
        whole.start(orders)
    else:
        part = OrderProblem(place, few, costs, limit)
        search = Improvement(part, least_time(place, few, costs, limit), whole.budget, whole.random)
        begin = whole.budget.spent()
        search.start(tasks_of(schedule) for schedule in published(place, few, costs, limit))
        search.improve(begin + REPEATING * (until - begin))
        whole.take_all(orders)
        whole.learn(_repeated(problem, part, search.orders))
        if not whole.orders:  # of all these no order keeps the limit
            whole.start(())
    whole.improve(until)
    return whole


def _repeated(problem: OrderProblem, part: OrderProblem, orders: Orders) -> Ends:
    """Return the ends of the part's actions with the middle one of each kind repeated, as often as it takes."""
    _, ends = part.replay(orders)
    few, middle = part.microbatches, part.microbatches // 2
    first, last = few // 3, few - 1 - few // 3
    period = max(problem.busy, *((row[last] - row[first]) / max(1, last - first) for row in ends))
    more = problem.microbatches - few
    return [
        [
            *row[:middle],
            *(row[middle] + k * period for k in range(more)),
            *(end + more * period for end in row[middle:]),
        ]
        for row in ends
    ]


# -- Better orders of a problem, by priorities, by blocks, and by moves on the critical path --------------------------


PATIENCES = (0.01, 0.5, 1.0)
EAGER = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)  # busy times by which a backward is put before its time
LATER_FIRST = (0.0, 1.0, -1.0, 3.0)  # busy times by which a later stage of a rank is put before its time
FAR = 1e6  # busy times by which a weight gradient is put off: it only fills
KEPT = 5  # good priorities that are varied
FIRST = 0.3  # share of the budget in which orders are varied and rearranged at first
BLOCKS = 0.5  # share in which a block is searched
NEAR = 0.01  # share of the bound by which a schedule may be longer without that
CHANGE = 0.05  # steps that a change of a block counts
VARIED = 0.7  # share of a round
SOME = 0.5  # share of changes to some micro-batches only, at the second time
WARM = 0.01  # busy times: how much longer a schedule may be that is taken on the way


class Improvement:
    """The best orders of a problem so far; the search stops at `bound`, and shares its budget with others."""

    def __init__(self, problem: OrderProblem, bound: float, budget: Budget, random: Random) -> None:
        self.problem, self.goal, self.budget, self.random = problem, bound * (1 + 1e-9), budget, random
        self.makespan: float = NEVER
        self.orders: Orders = []
        self.good: list[tuple[float, Priorities]] = []

    def start(self, known: Iterable[Orders]) -> None:
        """Take orders, and priorities by rule: at least one, which keeps the limit, and more while there is time."""
        for ends in self.take_all(known):
            self.learn(ends)
        several = max(map(len, self.problem.own)) > 1
        for rule in product(
            PATIENCES, EAGER, LATER_FIRST if several else (0.0,), (True, False) if several else (True,)
        ):
            if self.is_done() or (self.orders and self.budget.spent() >= 1):
                return
            self._try(self._by_rule(*rule))

    def take_all(self, known: Iterable[Orders]) -> list[Ends]:
        """Take those of the orders that keep the limit; return their ends."""
        all_ends = []
        for orders in known:
            if self.problem.fits(orders):
                makespan, ends = self.problem.replay(orders)
                self._take(makespan, orders)
                all_ends.append(ends)
        return all_ends

    def improve(self, until: float) -> None:
        """Vary and rearrange until so much of the budget is used up, or the bound is reached; twice.

        In between a block is searched where the bound is still far.
        """
        begin = self.budget.spent()
        if self.is_done() or begin >= until:
            return
        far = begin + FIRST * (until - begin)
        for turn, (start, end) in enumerate(((begin, far), (far, until))):
            if turn and self.makespan > (1 + NEAR) * self.goal:
                start += BLOCKS * (until - begin)
                block = BlockSearch(self.problem, self.random).search(self.budget.until(start, CHANGE))
                for ends in self.take_all([] if block is None else [orders_of(self.problem, block)]):
                    self.learn(ends)
            self._vary(start + VARIED * (end - start), SOME * (turn > 0))
            self._rearrange(end)
            if self.is_done():
                return
            self.learn(self.problem.replay(self.orders)[1])

    def is_done(self) -> bool:
        """Whether the bound is reached."""
        return self.makespan <= self.goal

    def learn(self, ends: Ends) -> None:
        """Take the times of a schedule as priorities, with weight gradients at theirs, or as fillers."""
        if all(len(of_task) == self.problem.microbatches for of_task in ends):
            numbers = [[end - time for end in of_task] for of_task, time in zip(ends, self.problem.seconds)]
            off = FAR * self.problem.busy
            fillers = [[n + off for n in row] if task % 3 == 2 else row for task, row in enumerate(numbers)]
            for rows, patience in product((numbers, fillers), PATIENCES):
                self._try(Priorities(rows, patience, 0.0, False))

    def _take(self, makespan: float, orders: Orders) -> None:
        if makespan < self.makespan:
            self.makespan, self.orders = makespan, orders

    def _try(self, priorities: Priorities) -> None:
        self.budget.used += 1
        makespan, orders = decide(self.problem, priorities)
        if makespan < NEVER:
            self._take(makespan, orders)
            if all(abs(makespan - other) > 1e-9 * makespan for other, _ in self.good):
                self.good = sorted([*self.good, (makespan, priorities)], key=lambda pair: pair[0])[:KEPT]

    def _by_rule(self, patience: float, eager: float, later_first: float, reserved: bool) -> Priorities:
        problem, time = self.problem, 0.0
        first = [0.0] * len(problem.seconds)
        for task in problem.chain():
            if task % 3 != 2:
                time += problem.lag[task]
                later = problem.own[problem.rank[task]].index(task // 3)
                first[task] = time - problem.busy * (eager if task % 3 else later_first * later)
                time += problem.seconds[task]
            else:
                first[task] = time + FAR * problem.busy
        numbers = [[begin + k * problem.busy for k in range(problem.microbatches)] for begin in first]
        return Priorities(numbers, patience, 0.0, reserved)

    def _vary(self, until: float, some: float) -> None:
        draw, problem = self.random, self.problem
        while self.good and not self.is_done() and self.budget.spent() < until:
            # at first all of them by turns: one that is stuck may be the best for long
            number = min(int(draw.expovariate(0.8)) if some else draw.randrange(KEPT), len(self.good) - 1)
            worst, (numbers, patience, ahead, reserved) = self.good[number]
            numbers = list(numbers)
            for _ in range(draw.choice((1, 1, 2, 3))):
                task = draw.randrange(len(numbers))
                numbers[task] = self._changed(task, numbers, some)
            if draw.random() < 0.15:
                patience = draw.choice((0.01, 0.25, 0.5, 0.75, 1.0, 1.5))
            if draw.random() < 0.1:
                ahead = draw.choice((0.0, 0.0, 0.2, 0.5, 1.0)) * max(problem.seconds)
            if draw.random() < 0.05:
                reserved = not reserved
            self.budget.used += 1
            varied = Priorities(numbers, patience, ahead, reserved)
            makespan, orders = decide(problem, varied)
            if makespan <= worst:
                self._take(makespan, orders)
                self.good[number] = (makespan, varied)
                self.good.sort(key=lambda pair: pair[0])

    def _changed(self, task: int, numbers: list[list[float]], some: float) -> list[float]:
        """Return other priorities of one task, for all or for some micro-batches in a row."""
        draw, row = self.random, list(numbers[task])
        those = range(len(row))
        if draw.random() < some:
            begin = draw.randrange(len(row))
            those = those[begin : begin + draw.randrange(1, 8)]
        shift = draw.gauss(0, 1) * self.problem.busy
        if task % 3 == 2:
            off = FAR * self.problem.busy if draw.random() < 0.3 else abs(shift)
            for k in those:
                row[k] = numbers[task - 1][k] + off
        else:
            shift *= draw.choice((0.1, 0.3, 1, 3))
            for k in those:
                row[k] += shift
        return row

    def _rearrange(self, until: float) -> None:
        draw, problem = self.random, self.problem
        makespan, ends = problem.replay(self.orders)
        moves = critical_moves(problem, self.orders, ends)

        def changed(state: tuple[Orders, Ends]) -> tuple[tuple[Orders, Ends], float] | None:
            orders = moved(problem, state[0], draw.choice(moves))
            self.budget.used += 1
            if orders is None:
                return None
            makespan, ends = problem.replay(orders)
            return (orders, ends), makespan

        warm = WARM * (problem.busy or 1.0)
        states = anneal((self.orders, ends), makespan, changed, self.budget.until(until, 0), draw, warm, warm)
        while moves and not self.is_done() and (taken := next(states, None)) is not None:
            (orders, ends), makespan = taken
            self._take(makespan, orders)
            moves = critical_moves(problem, orders, ends)
