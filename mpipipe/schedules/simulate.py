"""How long a schedule takes, where it idles, and how many activations it holds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.check import check
from mpipipe.schedules.replay import replay
from mpipipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Costs:
    """Times per chunk and micro-batch, in any one unit; each is a number, or a sequence of one number per stage.

    Attributes
    ----------
    forward : time of F
    input_grad, weight_grad : times of I and W; B takes both
    transfer : one message between stage l-1 and stage l, forth or back, where they lie on different ranks; given per
        stage, entry l is the hop into stage l and entry 0 is not used
    """

    forward: float | Sequence[float] = 1
    input_grad: float | Sequence[float] = 1
    weight_grad: float | Sequence[float] = 1
    transfer: float | Sequence[float] = 0

    def per_stage(self, name: str, stages: int) -> list[float]:
        """The cost `name` as one float for each stage."""
        value = getattr(self, name)
        try:
            costs = [float(value)] * stages if isinstance(value, Real) else [float(cost) for cost in value]
        except (TypeError, ValueError):
            costs = []
        if len(costs) != stages or not all(0 <= cost < math.inf for cost in costs):
            raise ArgumentError(
                f"the cost {name} does not fit the schedule",
                found=f"{name}={value!r}",
                expected=f"a finite number of at least 0, or {stages} of them, one per stage",
            )
        return costs


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found.

    Attributes
    ----------
    schedule : the schedule that ran
    makespan : time from the first start to the last end, in the unit of the costs
    bubble_fraction : idle / (ranks * makespan)
    bubble_ratio : idle / busy, the (P-1)/M of the literature
    peak_activations : for each rank the largest number of chunk activations alive at once, from F until B (or W where
        the backward is split), both ends included; 0 in a schedule of forwards only, which keeps nothing
    spans : for each rank a tuple of (action, start, end)
    """

    schedule: Schedule
    makespan: float
    bubble_fraction: float
    bubble_ratio: float
    peak_activations: list[int]
    durations: dict[str, list[float]] = field(repr=False)
    starts: list[array] = field(repr=False)

    @cached_property
    def spans(self) -> tuple[tuple[tuple[Action, float, float], ...], ...]:
        return tuple(
            tuple(
                (action, start, start + self.durations[action.op][action.stage]) for action, start in zip(order, began)
            )
            for order, began in zip(self.schedule.orders, self.starts)
        )


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Run `schedule` on paper: an action starts when its rank is free and its input is there; sends are free.

    Parameters
    ----------
    schedule : Schedule; it is checked first
    costs : Costs

    Returns
    -------
    Timeline

    Raises
    ------
    ScheduleError : the schedule cannot run
    ArgumentError : a cost is negative, not finite, or not one per stage
    """
    check(schedule)
    durations = action_times(costs, schedule.stages)
    starts, ends = replay(schedule, durations, costs.per_stage("transfer", schedule.stages))
    makespan = max(ends)
    # A checked schedule is complete: every stage runs every micro-batch forward and, if there are backwards, back.
    ops = (FORWARD,) if _forwards_only(schedule) else (FORWARD, BACKWARD)
    busy = schedule.microbatches * math.fsum(cost for op in ops for cost in durations[op])
    # Rounding of the sums must not make a negative bubble where there is none.
    idle = max(0.0, schedule.ranks * makespan - busy)
    return Timeline(
        schedule,
        makespan,
        bubble_fraction=idle / (schedule.ranks * makespan) if makespan else 0.0,
        bubble_ratio=idle / busy if busy else math.inf if idle else 0.0,
        peak_activations=peak_activations(schedule),
        durations=durations,
        starts=starts,
    )


def action_times(costs: Costs, stages: int) -> dict[str, list[float]]:
    """For each op its time in each stage."""
    input_grad, weight_grad = costs.per_stage("input_grad", stages), costs.per_stage("weight_grad", stages)
    return {
        FORWARD: costs.per_stage("forward", stages),
        BACKWARD: [first + second for first, second in zip(input_grad, weight_grad)],
        INPUT_GRAD: input_grad,
        WEIGHT_GRAD: weight_grad,
    }


def peak_activations(schedule: Schedule) -> list[int]:
    """For each rank the largest number of chunk activations that its order holds at once; independent of costs."""
    if _forwards_only(schedule):
        return [0] * schedule.ranks
    return [_peak(order) for order in schedule.orders]


def _forwards_only(schedule) -> bool:
    return all(action.op == FORWARD for order in schedule.orders for action in order)


def _peak(order) -> int:
    alive = peak = 0
    for _, op, _ in order:
        if op == FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif op != INPUT_GRAD:
            alive -= 1
    return peak
