"""Counts in words, as messages and pictures write them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural.

    Parameters
    ----------
    count : int
        How many there are.
    noun : str
        The noun in the singular.

    Returns
    -------
    str
        Such as "1 rank" or "3 batches".

    Examples
    --------
    >>> from mpipipe.wording import counted
    >>> counted(1, "core"), counted(4, "core"), counted(2, "micro-batch")
    ('1 core', '4 cores', '2 micro-batches')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"
