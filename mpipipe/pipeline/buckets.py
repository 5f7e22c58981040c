"""Gradients cut into buckets, in the order in which the layers of a stage complete them.

    layer        0     1     2          | 0 1 2 |
    matrices     |-----|-----|-----|    |-------|  gains and biases
    bucket          2     1     0           3

A backward goes from the last layer to the first. A bucket is complete when the first of its layers has ended. So it is
cut from the end of the buffer, where it can at the edge of a layer, and what holds pieces of all layers stands apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Bucket(NamedTuple):
    """A range of one array of gradients; `place` is that of the layer whose end completes it."""

    array: int
    start: int
    stop: int
    place: int


def cut(arrays: Sequence[Sequence[tuple[int, int]]], count: int) -> list[Bucket]:
    """Return the buckets of some arrays, those first that are complete first.

    Parameters
    ----------
    arrays : for each array its pieces, (where it ends, place of the layer that writes to it), in the order of memory
    count : most elements of a bucket
    """
    buckets = []
    for array, pieces in enumerate(arrays):
        for run in _rising(pieces):
            buckets += [Bucket(array, *bucket) for bucket in _cut_run(run, count)]
    return sorted(buckets, key=lambda bucket: (-bucket.place, bucket.array, -bucket.stop))


def _rising(pieces: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Pieces as (start, stop, place), in longest runs of consecutive ones whose places do not fall."""
    runs: list[list[tuple[int, int, int]]] = []
    start, before = 0, -1
    for stop, place in pieces:
        if not runs or place < before:
            runs.append([])
        runs[-1].append((start, stop, place))
        start, before = stop, place
    return runs


def _cut_run(run: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
    """(start, stop, place) of buckets of at most `count` elements, from the last to the first.

    A bucket begins at the edge of a layer where that leaves it half of `count` at least.
    """
    first, stop = run[0][0], run[-1][1]
    edges = [after[0] for before, after in pairwise(run) if before[2] < after[2]]
    buckets = []
    while stop > first:
        start = max(first, stop - count)
        edge = min((edge for edge in edges if start <= edge < stop), default=start)
        if 2 * (stop - edge) >= count:
            start = edge
        place = next(place for _, end, place in run if end > start)
        buckets.append((start, stop, place))
        stop = start
    return buckets
