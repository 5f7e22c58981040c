"""A schedule as a table of text: one row per rank, one column per slot."""

from __future__ import annotations

from collections.abc import Iterable

from mpipipe.schedules.schedule import Schedule
from mpipipe.wording import counted

WINDOW_RANKS, WINDOW_SLOTS = 16, 12  # what of a large table is shown around a marked cell: fits a terminal


def grid(
    schedule: Schedule,
    mark: tuple[int, int] | list[tuple[int, int]] | None = None,
    missing: Iterable[tuple[int, str]] = (),
) -> str:
    """Write the orders of all ranks as a table; column k holds the k-th action of each rank.

    Parameters
    ----------
    schedule : Schedule
        A schedule, right or wrong.
    mark : (rank, slot) or list of (rank, slot), optional
        Cells to mark, as ``>2F0<``. Of a large table only the part around the first mark is shown.
    missing : iterable of (rank, text), optional
        Cells that the schedule lacks. They are marked at the end of the rank's row.

    Returns
    -------
    str
        Lines without a final newline.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.grid(schedules.one_f_one_b(2, 2), mark=(1, 2)))
    slot    0    1    2    3
    rank 0  0F0  0F1  0B0  0B1
    rank 1  1F0  1B0 >1F1< 1B1
    """
    marks = [mark] if isinstance(mark, tuple) else list(mark or ())
    absent: dict[int, list[str]] = {}
    for rank, text in missing:
        texts = absent.setdefault(rank, [])
        marks.append((rank, len(schedule.orders[rank]) + len(texts)))
        texts.append(text)
    ranks = range(schedule.ranks)
    if marks:
        ranks = _around(marks[0][0], WINDOW_RANKS, ranks)
    rows: dict[int, list[object]] = {rank: [*schedule.orders[rank], *absent.get(rank, ())] for rank in ranks}
    longest = max(map(len, rows.values()), default=0)
    slots = _around(marks[0][1], WINDOW_SLOTS, range(longest)) if marks else range(longest)
    marked = set(marks)

    def cell(rank: int, slot: int) -> str:
        if slot >= len(rows[rank]):
            return ""
        text = str(rows[rank][slot])
        return f">{text}<" if (rank, slot) in marked else f" {text} "

    head = ["slot ", *(f" {slot} " for slot in slots)]
    table = [head] + [[f"rank {rank} ", *(cell(rank, slot) for slot in slots)] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in table]
    if len(ranks) < schedule.ranks or len(slots) < longest:
        lines.append(f"(shown: {len(ranks)} of {counted(schedule.ranks, 'rank')}, {len(slots)} of {longest} slots)")
    return "\n".join(lines)


def _around(place: int, width: int, whole: range) -> range:
    start = max(0, min(place - width // 2, len(whole) - width))
    return whole[start : start + width]
