"""The places of W's in an order of F's and I's: they fill the waits that follow from the costs, if memory allows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.kinds import Form, Orders
from mpipipe.schedules.list_scheduler import ListScheduler, Queue
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, simulate

PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W's time: a rank that would wait for less than that begins no W
Queues: TypeAlias = Sequence[Sequence[Queue]]  # the queues of each rank: see ListScheduler.run

# what is to be small: the longest time from a rank's begin to its end, makespan, memory
Score: TypeAlias = "tuple[float, float, int]"


class Filled(NamedTuple):
    """Orders, and how good they are."""

    score: Score
    orders: Orders


def filled(
    form: Form, queues: Queues, limit: float, patience: float, kept: float = 1.0, *, prompt: bool = False
) -> Filled | None:
    """Return the orders that follow from these queues; None if they cannot end within the memory limit.

    Parameters
    ----------
    form : Form
        Stages, micro-batches and times; its limit is not used.
    queues : Queues
        For each rank its F's and I's: see ListScheduler.run.
    limit : float
        Activations that a rank may hold at once.
    patience, kept, prompt : float, float, bool
        See ListScheduler.
    """
    run = ListScheduler(form, limit=limit, patience=patience, kept=kept, prompt=prompt).run(queues)
    if run is None:
        return None
    spans = max(end - start for start, end in zip(run.starts, run.ends))
    return Filled((spans, max(run.ends), sum(run.peaks)), run.orders)


def score_of(schedule: Schedule, costs: Costs) -> Score:
    """Return the score of a schedule that was not made here."""
    timeline = simulate(schedule, costs)
    spans = max(end - starts[0] for starts, end in zip(timeline.starts, timeline.ends))
    return spans, timeline.makespan, sum(timeline.peak_activations)


def fastest(candidates: Iterable[Filled | None], least: tuple[float, float] = (0.0, 0.0)) -> Filled | None:
    """Return the first candidate with the best score; None if all candidates are None.

    Parameters
    ----------
    least : tuple of two floats
        A span and a makespan that none can beat. After a candidate that is as fast no other one is made, though it
        might hold less.
    """
    best: Filled | None = None
    for each in candidates:
        if each is not None and (best is None or each.score < best.score):
            best = each
            if best.score[0] <= least[0] and best.score[1] <= least[1]:
                break
    return best
