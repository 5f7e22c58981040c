"""The records of all ranks on the clock of rank 0.

Each clock was compared with that of rank 0 before the first and behind the last recorded step. Between the two its
offset is taken to grow evenly, which is the drift. What is left are the errors of the comparisons: some microseconds.
They can make a message arrive before it was sent. So the clocks are moved against each other, as little as it takes,
until none does: clock d by the longest path to d of the constraints

    shift[d] >= shift[s] + max over messages from s to d of (sent - received)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mpipipe.analysis.deliveries import deliveries
from mpipipe.analysis.record import RankRecord


def on_one_clock(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the records with all times by the clock of rank 0."""
    moved = [_moved(record, _clock(record)) for record in records]
    shifts = _shifts(moved)
    return [_moved(record, _ahead(shift)) for record, shift in zip(moved, shifts)]


def _moved(record: RankRecord, clock: Callable[[float], float]) -> RankRecord:
    return record._replace(steps=[step.moved(clock) for step in record.steps])


def _clock(record: RankRecord) -> Callable[[float], float]:
    (first, ahead), (last, ahead_then) = record.clock
    drift = (ahead_then - ahead) / (last - first) if last > first else 0.0
    return lambda time: time + ahead + drift * (time - first)


def _ahead(seconds: float) -> Callable[[float], float]:
    return lambda time: time + seconds


def _shifts(records: Sequence[RankRecord]) -> list[float]:
    """Seconds to add to each clock, so that no message arrives before it was sent."""
    early: dict[tuple[int, int], float] = {}  # (source, target) -> how much too early a message arrived at most
    for each in deliveries(records):
        pair = each.source, each.target
        early[pair] = max(early.get(pair, -math.inf), each.sent - each.received)
    shifts = [0.0] * len(records)
    for _ in records:  # Bellman and Ford; without a solution (clocks that drift unevenly) the rest stays as it is
        for (source, target), seconds in early.items():
            shifts[target] = max(shifts[target], shifts[source] + seconds)
    return shifts
