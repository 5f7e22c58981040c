"""The block distribution: the one way in which mpipipe cuts a length into parts of nearly equal size."""

from __future__ import annotations


def even_split(length: int, parts: int) -> list[range]:
    """Cut 0..length-1 into consecutive ranges whose sizes differ by one at most, the longer ones first.

    Parameters
    ----------
    length : int
        Number of items, at least 0.
    parts : int
        Number of ranges, at least 1. Ranges are empty if there are more parts than items.

    Returns
    -------
    list of range
        The items of each part: range ``p`` starts at ``p * (length // parts) + min(p, length % parts)``.

    Examples
    --------
    >>> from mpipipe.even_split import even_split
    >>> even_split(10, 3)
    [range(0, 4), range(4, 7), range(7, 10)]
    >>> [len(part) for part in even_split(2, 4)]
    [1, 1, 0, 0]
    """
    size, longer = divmod(length, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]
