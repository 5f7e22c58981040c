"""The places of W's in an order of F's and I's: they fill the waits that follow from the costs, if memory allows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.action import Action
from mpipipe.schedules.list_scheduler import ListScheduler
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, simulate

PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W's time: a rank that would wait for less than that begins no W
Queues: TypeAlias = "Sequence[Sequence[Sequence[Action]]]"  # the queues of each rank: see ListScheduler.run


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
    """Return the schedule that follows from these queues; None if it cannot end within the memory limit.

    Parameters
    ----------
    form : Schedule
        Has the name, the placement and the number of micro-batches.
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
    """Return the first candidate with the best score; None if all candidates are None."""
    found = min((each for each in candidates if each is not None), key=lambda each: each.score, default=None)
    return None if found is None else found.schedule
