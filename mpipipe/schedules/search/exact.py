"""The fastest schedule of all, for small problems, by constraint programming with OR-Tools (extra ``[search]``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mpipipe.schedules.action import FORWARD
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.checks import at_least_one, check_time, counts
from mpipipe.schedules.schedule import Schedule, looped_placement
from mpipipe.schedules.search.problem import OPS, OrderProblem, Orders
from mpipipe.schedules.search.search import search
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, Timeline, simulate
from mpipipe.schedules.slices import backward_unit, in_slices
from mpipipe.text import optional_library

STEPS = 200  # of the search whose result it begins with
UNITS = tuple(10**digits for digits in range(7))  # in a unit of time: the first one that makes all costs whole


class Optimum(NamedTuple):
    """The result of `optimum`.

    Attributes
    ----------
    schedule : Schedule
        The fastest that was found.
    makespan, bound : float
        Its time, and the time that no schedule beats: where they are equal, it is the fastest of all.
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
    slices: int = 1,
    seconds: float = 60.0,
) -> Optimum:
    """Find the fastest schedule with a split backward, by OR-Tools CP-SAT on all cores.

    Some ten actions per rank take less than a second, a hundred may take minutes. Costs with more than six digits
    after the point are rounded down for the search, so that the bound holds. Without OR-Tools BackendError is raised,
    and ArgumentError where an argument does not fit.

    Parameters
    ----------
    placement : int or sequence of int
        The number of ranks with one stage each, or the rank of each stage.
    microbatches, costs, memory_limit, slices : as for `search`
        Slices of different times are refused: that each stage may take the sequences in turn is proven for equal ones.
    seconds : float, optional
        When the search is given up; the result is then the best so far, at worst that of `search`.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> found = schedules.optimum(2, 3, memory_limit=2)  # doctest: +SKIP
    >>> found.makespan, found.bound  # doctest: +SKIP
    (10.0, 10.0)
    """
    microbatches, slices = counts(microbatches=microbatches, slices=slices)
    units = microbatches * slices
    costs.refuse_unequal_slices("the fastest schedule of all is found")
    if not isinstance(placement, Sequence):
        placement = looped_placement(at_least_one("ranks", placement), 1)
    check_time(seconds)
    otherwise = "; or schedules.search, which needs nothing"
    cp_model = optional_library("ortools.sat.python.cp_model", "find the fastest schedule of all", "search", otherwise)
    options = dict(memory_limit=memory_limit, slices=slices, seconds=seconds / 2, steps=STEPS)
    quick = search(placement, microbatches, costs, **options)  # type: ignore[arg-type]
    model = _Model(OrderProblem(placement, units, costs, memory_limit), cp_model, simulate(quick, costs))
    orders, bound = model.solve(seconds)
    made = [] if orders is None else [in_slices(model.problem.schedule("optimum", orders), slices)]
    makespan, schedule = min(
        ((simulate(each, costs).makespan, each) for each in [*made, quick]), key=lambda pair: pair[0]
    )
    schedule = replace(schedule, name="optimum")
    least = least_time(placement, units, costs, memory_limit, slices=slices)
    return Optimum(schedule, makespan, min(makespan, max(bound, least)))


class _Model:
    """Start times of all actions: each task in the order of micro-batches, one action of a rank at a time."""

    def __init__(self, problem: OrderProblem, cp_model: Any, known: Timeline) -> None:
        slices = known.schedule.slices
        self.problem, self.cp = problem, cp_model
        self.model = model = cp_model.CpModel()
        times = [*problem.seconds, *problem.lag]
        self.unit = next((unit for unit in UNITS if all(_is_whole(time * unit) for time in times)), UNITS[-1])
        self.seconds, lag = ([_floor(time * self.unit) for time in row] for row in (problem.seconds, problem.lag))
        self.horizon = horizon = math.ceil(known.makespan * self.unit)
        count = range(problem.microbatches)
        self.starts = [
            [model.new_int_var(0, horizon, f"{task} {k}") for k in count] for task in range(len(problem.seconds))
        ]
        self.makespan = model.new_int_var(0, horizon, "makespan")
        for task, starts in enumerate(self.starts):
            before = problem.waits_for[task]
            for k, start in enumerate(starts):
                if k:
                    model.add(start >= starts[k - 1] + self.seconds[task])
                if before >= 0:
                    # all slices of a sequence go forward before the first backward, in the last stage
                    done = backward_unit(k, slices) if (task, before % 3) == (before + 1, 0) else k
                    model.add(start >= self.starts[before][done] + self.seconds[before] + lag[task])
            model.add(self.makespan >= starts[-1] + self.seconds[task])
        for own, tasks in zip(problem.own, problem.tasks):
            self._add_rank(own, tasks)
        for spans in known.spans:
            for (stage, op, k), start, _ in spans:
                run = k if op == FORWARD else backward_unit(k, slices)  # which is its own inverse
                model.add_hint(self.starts[3 * stage + OPS.index(op)][run], round(start * self.unit))
        model.minimize(self.makespan)

    def _add_rank(self, own: Sequence[int], tasks: Sequence[int]) -> None:
        model, lives = self.model, []
        runs = [
            model.new_fixed_size_interval_var(start, self.seconds[task], "")
            for task in tasks
            for start in self.starts[task]
        ]
        for stage in own:
            for opened, closed in zip(self.starts[3 * stage], self.starts[3 * stage + 2]):
                size = model.new_int_var(0, self.horizon, "")
                lives.append(model.new_interval_var(opened, size, closed + self.seconds[3 * stage + 2], ""))
        model.add_no_overlap(runs)
        model.add_cumulative(lives, [1] * len(lives), self.problem.limit)

    def solve(self, seconds: float) -> tuple[Orders | None, float]:
        """Return the orders, None where none were found in time, and the bound."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, 0.0
        place = {task: number for number, task in enumerate(self.problem.chain())}
        orders = []
        for tasks in self.problem.tasks:
            began = sorted(  # of those that begin together, what takes no time comes first
                (solver.value(start), self.seconds[task] > 0, k, place[task], task)
                for task in tasks
                for k, start in enumerate(self.starts[task])
            )
            orders.append([task for *_, task in began])
        return orders, solver.best_objective_bound / self.unit


def _floor(time: float) -> int:
    return round(time) if _is_whole(time) else math.floor(time)


def _is_whole(time: float) -> bool:
    return abs(time - round(time)) <= 1e-9 * max(1.0, abs(time))
