"""Cuts of the layers into stages by their measured time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mpipipe import schedules
from mpipipe.planning.profile import Profile

HALVINGS = 50  # of the interval in which the time of the slowest stage lies


def cuts_by_time(profile: Profile, size: int, placement: Sequence[int]) -> list[tuple[int, ...]]:
    """Return cuts into stages in which the slowest one is as fast as possible: on the mean rank, and on its own rank.

    Parameters
    ----------
    profile : what was measured
    size : sequences of a micro-batch
    placement : rank of each stage
    """
    times = []
    for rank in profile.costs[size]:
        times.append([rank.layers[kind].forward + rank.layers[kind].backward for kind in profile.kinds])
        times[-1][-1] += rank.loss
    even = schedules.partition([sum(of_ranks) for of_ranks in zip(*times)], len(placement))
    found = tuple(stop - start for start, stop in even)
    return list(dict.fromkeys([found, _cut_by_rank(times, placement)]))


def _cut_by_rank(times: Sequence[Sequence[float]], placement: Sequence[int]) -> tuple[int, ...]:
    """Give each stage in turn as many layers as its rank does in a time; find the least time that is enough."""
    before = [list(accumulate(own, initial=0.0)) for own in times]  # on each rank, ahead of each layer
    low, high = 0.0, max(own[-1] for own in before)
    best = _filled(before, placement, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried = _filled(before, placement, middle)
        if sum(tried) == len(times[0]):
            high, best = middle, tried
        else:
            low = middle
    return best


def _filled(before: Sequence[Sequence[float]], placement: Sequence[int], limit: float) -> tuple[int, ...]:
    """Fill the stages up to the limit, with a layer each at least, and one left for each stage behind."""
    counts, start = [], 0
    for stage, rank in enumerate(placement):
        own = before[rank]
        most = len(own) - 1 - (len(placement) - 1 - stage)
        stop = min(most, max(start + 1, bisect_right(own, own[start] + limit * (1 + 1e-12)) - 1))
        counts.append(stop - start)
        start = stop
    return tuple(counts)
