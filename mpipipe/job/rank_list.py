"""Lists of ranks as messages write them: short, however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterable

LISTED = 8  # runs of numbers that are written out


def numbers(ranks: Iterable[int], size: int | None = None) -> str:
    """Return rank numbers in ascending order, those that follow each other as a run.

    Where several ranks are all `size`, the answer is "all" and their number.

    >>> from mpipipe.job.rank_list import numbers
    >>> numbers([7, 0, 1, 2, 3])
    '0-3, 7'
    >>> numbers([0, 1, 2, 3], 4)
    'all 4'
    >>> numbers(range(0, 4096, 2))
    '0, 2, 4, 6, 8, 10, 12, 14 and 2040 more'
    """
    ranks = set(ranks)
    if len(ranks) == size != 1:
        return f"all {size}"
    texts = runs(ranks)
    more = len(ranks) - sum(map(_length, texts[:LISTED]))
    return ", ".join(texts[:LISTED]) + (f" and {more} more" if more else "")


def runs(numbers: Iterable[int]) -> list[str]:
    """Return numbers in ascending order, those that follow each other as one text: "0-3"."""
    listing: list[list[int]] = []
    for number in sorted(set(numbers)):
        if listing and number == listing[-1][-1] + 1:
            listing[-1].append(number)
        else:
            listing.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in listing]


def _length(run: str) -> int:
    first, _, last = run.partition("-")
    return int(last or first) - int(first) + 1


def named(ranks: Iterable[int], size: int | None = None) -> str:
    """Return `numbers` with the word for them: "rank 3", "ranks 0-3, 7", "all 4 ranks"."""
    ranks = set(ranks)
    if len(ranks) == size != 1:
        return f"{numbers(ranks, size)} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers(ranks)}"


def grouped(texts: Iterable[tuple[int, str]], size: int | None = None) -> list[str]:
    """Return what each rank says as one text for all ranks that say the same: "ranks 0-2: done", "rank 3: lost"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return [f"{named(ranks, size)}: {text}" for text, ranks in ranks_of.items()]
