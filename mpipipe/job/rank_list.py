"""Lists of ranks as messages write them: short, however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

LISTED = 8  # runs of numbers that are written out


def numbers(ranks: Iterable[int], size: int | None = None) -> str:
    """Write ranks in ascending order, runs as "0-3"; "all 4" where several are all `size`.

    >>> from mpipipe.job.rank_list import numbers
    >>> numbers([7, 0, 1, 2, 3]), numbers([0, 1, 2, 3], 4)
    ('0-3, 7', 'all 4')
    >>> numbers(range(0, 4096, 2))
    '0, 2, 4, 6, 8, 10, 12, 14 and 2040 more'
    """
    ranks = set(ranks)
    if len(ranks) == size != 1:
        return f"all {size}"
    listed = runs(ranks)[:LISTED]
    text = ", ".join(listed)
    last = int(listed[-1].rpartition("-")[2])
    more = sum(rank > last for rank in ranks)
    if more:
        text += f" and {more} more"
    return text


def runs(numbers: Iterable[int]) -> list[str]:
    """Return numbers in ascending order, those that follow each other as one text: "0-3"."""
    listing = []
    # Place and number differ by the same within a run.
    for _, pairs in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        text = str(run[0])
        if len(run) > 1:
            text += f"-{run[-1]}"
        listing.append(text)
    return listing


def named(ranks: Iterable[int], size: int | None = None) -> str:
    """Return `numbers` with the word for them: "rank 3", "ranks 0-3, 7", "all 4 ranks"."""
    ranks = set(ranks)
    if len(ranks) == size != 1:
        return f"{numbers(ranks, size)} ranks"
    noun = "ranks"
    if len(ranks) == 1:
        noun = "rank"
    return f"{noun} {numbers(ranks)}"


def by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return {text: ranks that say it}, in the order in which the texts come."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def grouped(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Return texts such as "ranks 0-2: done", one for all ranks that say the same."""
    return [f"{named(ranks)}: {text}" for text, ranks in by_text(texts).items()]
