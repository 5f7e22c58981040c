"""The places of W's in an order of F's and I's: they fill the waits that follow from the costs, if memory allows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from mpipipe.schedules.action import Action
from mpipipe.schedules.list_scheduler import ListScheduler
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, simulate

PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W's time: a rank that would wait for less than that begins no W
Queues: TypeAlias = "Sequence[Sequence[Sequence[Action]]]"  # the queues of each rank: see ListScheduler.run


def filled(
    form: Schedule, queues: Queues, costs: Costs, limit: float, patience: float, kept: float = 1.0
) -> Schedule | None:
    """Return the schedule that follows from these queues; None if it cannot end within the memory limit.

    Parameters
    ----------
    form : Schedule
        Has the name, the placement and the number of micro-batches.
    limit : float
        Activations that a rank may hold at once.
    patience, kept : float
        See ListScheduler.
    """
    limits = [limit] * len(queues)
    run = ListScheduler(form.placement, form.microbatches, costs, limits=limits, patience=patience, kept=kept)
    orders = run.run(queues)
    return None if orders is None else Schedule(form.name, form.placement, form.microbatches, orders)


Score: TypeAlias = "tuple[float, float, int]"


def score(schedule: Schedule, costs: Costs) -> Score:
    """Return what is to be small: the longest time from a rank's first action to its last, the makespan, the memory."""
    timeline = simulate(schedule, costs)
    spans = [ends - starts[0] for starts, ends in zip(timeline.starts, timeline.ends)]
    return max(spans), timeline.makespan, sum(timeline.peak_activations)


def fastest(candidates: Iterable[Schedule | None], costs: Costs) -> Schedule | None:
    """Return the first candidate with the best score; None if all candidates are None."""
    return min((each for each in candidates if each is not None), key=lambda each: score(each, costs), default=None)
