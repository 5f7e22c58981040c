"""The best schedule that can be found for given costs and memory.

It begins with all schedules of the package that keep the limit, so it is never slower than one of them. For many
micro-batches the search is made with few of them; what they do in the middle is repeated, and the begin and the end are
kept (Lin et al. 2023, Tessel, arXiv:2311.15269).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from mpipipe.errors import ArgumentError, BackendError
from mpipipe.schedules import building_blocks, classic, kinds, zero_bubble
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.improve import Budget, Improvement
from mpipipe.schedules.kinds import OPS, Ends, Form, Orders, kinds_of
from mpipipe.schedules.schedule import Schedule, at_least_one, looped_placement
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, Timeline, simulate
from mpipipe.text import how_to_install

MANY, FEW = 4, 3  # micro-batches per rank: more are made from so many
REPEATING = 0.6  # share of the budget for the repeated part


def search(
    placement: int | Sequence[int],
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    *,
    chunks: int = 1,
    memory_limit: float | None = None,
    seconds: float = 10.0,
    steps: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Search for the fastest schedule; stop where none can be faster.

    Backwards are split into I and W. The result is not slower than any schedule of this package with the same stages on
    the same ranks that keeps the limit. `gap` tells how far it is from the best.

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
        Chunk activations that a rank may hold at once, at least its number of stages; by default there is no limit.
    seconds : float, optional
        Time to search, on one core.
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
        A count is below 1, a cost does not fit, no schedule keeps the limit, or there is no time.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> costs = schedules.Costs(forward=[1, 1, 1, 1.5], transfer=0.1)
    >>> found = schedules.search(4, 8, costs, memory_limit=4, seconds=60, steps=200)
    >>> schedules.gap(found, costs, memory_limit=4).share < 0.03
    True
    """
    microbatches = at_least_one("microbatches", microbatches)
    kinds.check_time(seconds)
    budget, random = Budget(seconds, None if steps is None else at_least_one("steps", steps)), Random(seed)
    best: Improvement | None = None
    bounds = [(least_time(place, microbatches, costs, memory_limit), place) for place in placements(placement, chunks)]
    for number, (bound, place) in enumerate(sorted(bounds)):
        if best is None or bound < best.makespan:
            form = Form(place, microbatches, costs, memory_limit)
            found = _searched(form, costs, Improvement(form, bound, budget, random), (number + 1) / len(bounds))
            if best is None or found.makespan < best.makespan:
                best = found
    assert best is not None
    best.improve(1.0)  # with what is left where a placement cannot be faster
    return best.form.schedule("search", best.orders)


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


def _searched(form: Form, costs: Costs, found: Improvement, until: float) -> Improvement:
    """Search one placement: as it is, or with few micro-batches first."""
    orders = [kinds_of(each) for each in published(form.placement, form.microbatches, costs, form.limit)]
    ranks = len(form.own)
    if form.microbatches <= MANY * ranks:
        found.start(orders)
    else:
        part = Form(form.placement, FEW * ranks, costs, form.limit)
        bound = least_time(form.placement, FEW * ranks, costs, form.limit)
        few = Improvement(part, bound, found.budget, found.random)
        begin = found.budget.spent()
        few.start(kinds_of(each) for each in published(form.placement, FEW * ranks, costs, form.limit))
        few.improve(begin + REPEATING * (until - begin))
        found.take_all(orders)
        found.learn(_repeated(form, part, few.orders))
        if not found.orders:  # none of all these keeps the limit
            found.start(())
    found.improve(until)
    return found


def _repeated(form: Form, part: Form, orders: Orders) -> Ends:
    """Return the ends of the part's actions with the middle one of each kind repeated, as often as it takes."""
    _, ends = part.replay(orders)
    few, middle = part.microbatches, part.microbatches // 2
    first, last = few // 3, few - 1 - few // 3
    period = max(form.busy, *((row[last] - row[first]) / max(1, last - first) for row in ends))
    more = form.microbatches - few
    return [
        [
            *row[:middle],
            *(row[middle] + k * period for k in range(more)),
            *(end + more * period for end in row[middle:]),
        ]
        for row in ends
    ]


# -- The fastest schedule of all, for small cases, by constraint programming with OR-Tools (extra ``[search]``) -------


STEPS = 200  # of the search whose result it begins with
UNITS = tuple(10**digits for digits in range(7))  # in a unit of time: the first one that makes all costs whole


class Optimum(NamedTuple):
    """The result of `optimum`.

    Attributes
    ----------
    schedule : Schedule
        The fastest that was found.
    makespan : float
        Its time.
    bound : float
        Time that no schedule beats. Where it is the makespan, the schedule is the fastest of all.
    """

    schedule: Schedule
    makespan: float
    bound: float


def optimum(
    placement: int | Sequence[int],
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    *,
    memory_limit: float | None = None,
    seconds: float = 60.0,
) -> Optimum:
    """Find the fastest schedule with a split backward, by OR-Tools CP-SAT on all cores.

    Some ten actions per rank take less than a second, a hundred may take minutes. Costs with more than six digits
    behind the point are rounded down for the search, so that the bound holds.

    Parameters
    ----------
    placement : int or sequence of int
        The number of ranks with one stage each, or the rank of each stage.
    microbatches : int
        M, at least 1.
    costs : Costs, optional
        Times of the stages; by default one unit for each of F, I and W.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, at least its number of stages; by default there is no limit.
    seconds : float, optional
        When the search is given up; the result is then the best so far, at worst that of `search`.

    Returns
    -------
    Optimum
        Schedule, makespan and bound.

    Raises
    ------
    BackendError
        OR-Tools is not installed.
    ArgumentError
        A count is below 1, a cost does not fit, no schedule keeps the limit, or there is no time.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> found = schedules.optimum(2, 3, memory_limit=2)  # doctest: +SKIP
    >>> found.makespan, found.bound  # doctest: +SKIP
    (10.0, 10.0)
    """
    microbatches = at_least_one("microbatches", microbatches)
    if not isinstance(placement, Sequence):
        placement = looped_placement(at_least_one("ranks", placement), 1)
    kinds.check_time(seconds)
    cp_model = _solver()
    quick = search(placement, microbatches, costs, memory_limit=memory_limit, seconds=seconds / 2, steps=STEPS)
    model = _Model(Form(placement, microbatches, costs, memory_limit), cp_model, simulate(quick, costs))
    orders, bound = model.solve(seconds)
    found = [quick] if orders is None else [quick, model.form.schedule("optimum", orders)]
    makespan, _, schedule = min((simulate(each, costs).makespan, -number, each) for number, each in enumerate(found))
    schedule = Schedule("optimum", schedule.placement, microbatches, schedule.orders)
    least = least_time(placement, microbatches, costs, memory_limit)
    return Optimum(schedule, makespan, min(makespan, max(bound, least)))


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise BackendError(
            "OR-Tools is not installed, which finds the fastest schedule of all",
            remedy=f"{how_to_install('search')}, or schedules.search, which needs nothing",
        ) from error
    return cp_model


class _Model:
    """Start times of all actions: each kind in the order of micro-batches, one action of a rank at a time."""

    def __init__(self, form: Form, cp_model: Any, known: Timeline) -> None:
        self.form, self.cp = form, cp_model
        self.model = model = cp_model.CpModel()
        times = [*form.seconds, *form.lag]
        self.unit = next((unit for unit in UNITS if all(_is_whole(time * unit) for time in times)), UNITS[-1])
        self.seconds, lag = ([self._scaled(time) for time in row] for row in (form.seconds, form.lag))
        self.horizon = horizon = math.ceil(known.makespan * self.unit)
        count, kinds = range(form.microbatches), range(len(form.seconds))
        self.starts = [[model.new_int_var(0, horizon, f"{kind} {k}") for k in count] for kind in kinds]
        self.makespan = model.new_int_var(0, horizon, "makespan")
        for kind, starts in enumerate(self.starts):
            before = form.waits_for[kind]
            for k, start in enumerate(starts):
                if k:
                    model.add(start >= starts[k - 1] + self.seconds[kind])
                if before >= 0:
                    model.add(start >= self.starts[before][k] + self.seconds[before] + lag[kind])
            model.add(self.makespan >= starts[-1] + self.seconds[kind])
        for own in form.own:
            self._add_rank(own)
        for spans in known.spans:
            for (stage, op, k), start, _ in spans:
                model.add_hint(self.starts[3 * stage + OPS.index(op)][k], round(start * self.unit))
        model.minimize(self.makespan)

    def _add_rank(self, own: Sequence[int]) -> None:
        model, lives, runs = self.model, [], []
        for stage in own:
            for kind in range(3 * stage, 3 * stage + 3):
                runs += [
                    model.new_fixed_size_interval_var(start, self.seconds[kind], "") for start in self.starts[kind]
                ]
            for opened, closed in zip(self.starts[3 * stage], self.starts[3 * stage + 2]):
                size = model.new_int_var(0, self.horizon, "")
                lives.append(model.new_interval_var(opened, size, closed + self.seconds[3 * stage + 2], ""))
        model.add_no_overlap(runs)
        model.add_cumulative(lives, [1] * len(lives), self.form.limit)

    def solve(self, seconds: float) -> tuple[Orders | None, float]:
        """Return the orders, None where none were found in time, and the bound."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, 0.0
        place = {kind: number for number, kind in enumerate(self.form.chain())}
        orders = []
        for own in self.form.own:
            kinds = [kind for stage in own for kind in range(3 * stage, 3 * stage + 3)]
            began = sorted(  # of those that begin together, what takes no time comes first
                (solver.value(start), self.seconds[kind] > 0, k, place[kind], kind)
                for kind in kinds
                for k, start in enumerate(self.starts[kind])
            )
            orders.append([kind for *_, kind in began])
        return orders, solver.best_objective_bound / self.unit

    def _scaled(self, time: float) -> int:
        whole = round(time * self.unit)
        return whole if _is_whole(time * self.unit) else math.floor(time * self.unit)


def _is_whole(time: float) -> bool:
    return abs(time - round(time)) <= 1e-9 * max(1.0, abs(time))
