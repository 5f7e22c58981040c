"""How far a schedule can be from the best one, at most."""

from __future__ import annotations

from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules.bounds import lower_bound
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, simulate
from mpipipe.text import counted


class Gap(NamedTuple):
    """The result of `gap`.

    Attributes
    ----------
    share : float
        (makespan - bound) / bound: 0.4 says that the schedule is at most 40 % slower than the best one.
    makespan : float
        Time of the schedule.
    bound : float
        Time that no schedule beats.
    """

    share: float
    makespan: float
    bound: float


def gap(schedule: Schedule, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None) -> Gap:
    """Tell how far `schedule` is at most from the best one with the same stages on the same ranks.

    Parameters
    ----------
    schedule : Schedule
        It is checked first.
    costs : Costs, optional
        Times of the actions; by default one unit for each of F, I and W.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, in this schedule and in the best one; by default there is no
        limit. ``max(simulate(schedule).peak_activations)`` compares with schedules that need no more memory.

    Returns
    -------
    Gap
        The share, and both times.

    Raises
    ------
    ScheduleError
        The schedule cannot run.
    ArgumentError
        A cost does not fit, or the schedule does not keep the limit.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> found = schedules.gap(schedules.one_f_one_b(4, 8), memory_limit=4)
    >>> f"{found.share:.1%}", found.makespan, found.bound
    ('22.2%', 33.0, 27.0)
    """
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule, costs, memory_limit)
    held = max(timeline.peak_activations)
    if memory_limit is not None and held > memory_limit:
        raise ArgumentError(
            "the schedule does not keep the memory limit",
            found=f"{counted(held, 'activation')} on rank {timeline.peak_activations.index(held)}",
            expected=f"at most {memory_limit}",
            remedy=f"memory_limit={held}, or another schedule",
        )
    # rounding of sums must not put a schedule below its bound
    above = max(0.0, timeline.makespan - bound)
    return Gap(above / bound if bound else 0.0, timeline.makespan, bound)
