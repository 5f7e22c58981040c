"""The block distribution: the one way to cut a length into nearly equal parts."""

from __future__ import annotations


def even_split(length: int, parts: int) -> list[range]:
    """Cut 0..length-1 into ranges whose sizes differ by one at most, longer ones first.

    Range ``p`` starts at ``p * (length // parts) + min(p, length % parts)``. Ranges are empty where
    there are more parts than items.
    """
    size, longer = divmod(length, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]
