"""The block distribution: the one way to cut a length into nearly equal parts; and bins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def even_split(length: int, parts: int) -> list[range]:
    """Cut 0..length-1 into ranges whose sizes differ by one at most, longer ones first.

    Range ``p`` starts at ``p * (length // parts) + min(p, length % parts)``. Ranges are empty where
    there are more parts than items.
    """
    size, longer = divmod(length, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def consecutive_bins(items: Iterable[tuple[Item, int]], most: int) -> list[list[Item]]:
    """Put consecutive sizes into bins of at most `most`; a larger item is alone in one."""
    bins: list[list[Item]] = []
    filled = 0
    for item, size in items:
        if not bins or filled + size > most:
            bins.append([])
            filled = 0
        bins[-1].append(item)
        filled += size
    return bins
