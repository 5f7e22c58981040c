"""Where the W's go: given an order of F's and I's, they fill the waits that the costs make, as far as memory allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from mpipipe.schedules.action import Action
from mpipipe.schedules.list_scheduler import ListScheduler
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, simulate

PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W: a rank with less than that to wait does not begin one
Queues: TypeAlias = "Sequence[Sequence[Sequence[Action]]]"  # of each rank: see ListScheduler.run


def filled(
    form: Schedule, queues: Queues, costs: Costs, limit: float, patience: float, kept: float = 1.0
) -> Schedule | None:
    """Return the schedule that comes of these queues; None if that much memory does not let it end.

    Parameters
    ----------
    form : Schedule
        Whose name, placement and micro-batches it gets.
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
    """What is to be small: the longest time from a rank's first action to its last, the makespan, the memory."""
    timeline = simulate(schedule, costs)
    spans = [ends - starts[0] for starts, ends in zip(timeline.starts, timeline.ends)]
    return max(spans), timeline.makespan, sum(timeline.peak_activations)


def fastest(candidates: Iterable[Schedule | None], costs: Costs) -> Schedule | None:
    """Return the candidate with the best score, of equal ones the first; None if there is none."""
    return min((each for each in candidates if each is not None), key=lambda each: score(each, costs), default=None)
