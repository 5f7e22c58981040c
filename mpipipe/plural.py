"""A count with its noun: 1 rank, 2 micro-batches."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """Return a count with its noun, in the plural where it is not one.

    Parameters
    ----------
    count : int
        How many.
    thing : str
        One of them.

    Examples
    --------
    >>> from mpipipe.plural import counted
    >>> counted(1, "rank"), counted(2, "micro-batch"), counted(0, "piece")
    ('1 rank', '2 micro-batches', '0 pieces')
    """
    ending = "" if count == 1 else "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{ending}"
