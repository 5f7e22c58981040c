"""A schedule as a table of text: one row per rank, one column per slot."""

from __future__ import annotations

WINDOW_RANKS, WINDOW_SLOTS = 16, 12  # what of a large table is shown around a marked cell: fits a terminal


def grid(schedule, mark=None, missing=()) -> str:
    """The orders of all ranks; column k holds the k-th action of each rank.

    Parameters
    ----------
    schedule : a Schedule, right or wrong
    mark : (rank, slot) or a list of them, written as ``>2F0<``; of a large table only the part around the first one
        is shown, and the slots say which
    missing : pairs (rank, text): cells that should be there and are not, marked at the end of the rank's row

    Returns
    -------
    str : lines without a final newline
    """
    marks = [mark] if isinstance(mark, tuple) else list(mark or ())
    rows = [list(order) for order in schedule.orders]
    for rank, text in missing:
        marks.append((rank, len(rows[rank])))
        rows[rank].append(text)
    ranks, slots = _window(rows, marks)
    marked = set(marks)

    def cell(rank, slot):
        if slot >= len(rows[rank]):
            return ""
        text = str(rows[rank][slot])
        return f">{text}<" if (rank, slot) in marked else f" {text} "

    head = ["slot ", *(f" {slot} " for slot in slots)]
    table = [head] + [[f"rank {rank} ", *(cell(rank, slot) for slot in slots)] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in table]
    longest = max(map(len, rows), default=0)
    if len(ranks) < len(rows) or len(slots) < longest:
        lines.append(f"(shown: {len(ranks)} of {len(rows)} ranks, {len(slots)} of {longest} slots)")
    return "\n".join(lines)


def _window(rows, marks):
    """The ranks and slots to show: all, or, where something is marked, the surroundings of the first mark."""
    ranks, slots = range(len(rows)), range(max(map(len, rows), default=0))
    if not marks:
        return ranks, slots
    rank, slot = marks[0]
    return _around(rank, WINDOW_RANKS, ranks), _around(slot, WINDOW_SLOTS, slots)


def _around(place, width, whole):
    start = max(0, min(place - width // 2, len(whole) - width))
    return whole[start : start + width]
