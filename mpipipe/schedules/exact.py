"""The fastest schedule of all, for small cases, by constraint programming with OR-Tools (extra ``[search]``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpipipe.errors import BackendError
from mpipipe.schedules import given
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.kinds import OPS, Form, Orders
from mpipipe.schedules.schedule import Schedule, at_least_one, looped_placement
from mpipipe.schedules.search import search
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, Timeline, simulate
from mpipipe.wording import how_to_install

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
    given.check_time(seconds)
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
