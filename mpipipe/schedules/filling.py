"""Where the W's go: given an order of F's and I's, they fill the waits that the costs make, as far as memory allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.action import Action
from mpipipe.schedules.list_scheduler import ListScheduler
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, simulate

PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W: a rank with less than that to wait does not begin one
Queues: TypeAlias = "Sequence[Sequence[Sequence[Action]]]"  # of each rank: see ListScheduler.run


Score: TypeAlias = "tuple[float, float, int]"


class Filled(NamedTuple):
    """A schedule, and what is to be small: the longest time from a rank's begin to its end, makespan, memory."""

    score: Score
    schedule: Schedule


def filled(
    form: Schedule,
    queues: Queues,
    costs: Costs,
    limit: float,
    patience: float,
    kept: float = 1.0,
    *,
    prompt: bool = False,
) -> Filled | None:
    """Return the schedule that comes of these queues; None where that much memory does not let it end.

    Parameters
    ----------
    form : Schedule
        Whose name, placement and micro-batches it gets.
    limit : float
        Activations that a rank may hold at once.
    patience, kept, prompt : float, float, bool
        See ListScheduler.
    """
    limits = [limit] * len(queues)
    run = ListScheduler(
        form.placement, form.microbatches, costs, limits=limits, patience=patience, kept=kept, prompt=prompt
    ).run(queues)
    if run is None:
        return None
    spans = max(end - start for start, end in zip(run.starts, run.ends))
    made = Schedule(form.name, form.placement, form.microbatches, tuple(map(tuple, run.orders)))
    return Filled((spans, max(run.ends), sum(run.peaks)), made)


def simulated(schedule: Schedule, costs: Costs) -> Filled:
    """Return a schedule that was not made here, with its score."""
    timeline = simulate(schedule, costs)
    spans = max(end - starts[0] for starts, end in zip(timeline.starts, timeline.ends))
    return Filled((spans, timeline.makespan, sum(timeline.peak_activations)), schedule)


def fastest(candidates: Iterable[Filled | None]) -> Schedule | None:
    """Return the candidate with the best score, of equal ones the first; None where there is none."""
    found = min((each for each in candidates if each is not None), key=lambda each: each.score, default=None)
    return None if found is None else found.schedule
