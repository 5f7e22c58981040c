"""What the time of each rank was spent on, as a stacked bar for each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpipipe.errors import ArgumentError
from mpipipe.pictures.colours import INK, Look, ink_on, looks_of_series
from mpipipe.pictures.rows import AXIS, LEFT, add_rows, height_of_row
from mpipipe.pictures.sheet import MARGIN, SMALL, TEXT, WIDTH, Sheet, draw, is_number
from mpipipe.pictures.spread import spread

ROW, TOP, RIGHT = 40.0, 26.0, 14.0  # points
NAMED_BAR, BAR, GAP = 0.5, 0.84, 0.08  # of the height of a row: with names of narrow parts above it, without; below it
LOW = 32.0  # points of a row below which nothing is written at its parts, so that a key says what the colours are


def draw_split(ranks: Sequence[Mapping[str, float]], path: str | os.PathLike[str]) -> None:
    """Draw for each rank a bar of the parts of its time, with the names at the parts.

    A name stands in each part that has room for it; one that fits nowhere stands above the part where it is largest.

    Parameters
    ----------
    ranks : sequence of mappings of str to float
        For each rank the seconds of each part. Parts stand in the order in which they are first named.
    path : str or path
        A file that ends in .png or .svg. One that is there is replaced.

    Raises
    ------
    ArgumentError
        The name of the file ends otherwise, there are no ranks or no parts, or a time is negative or no finite number.
    BackendError
        Matplotlib (extra ``[plot]``) is not installed.
    StorageError
        The file cannot be written.

    Examples
    --------
    >>> import os, tempfile
    >>> from mpipipe import pictures
    >>> ranks = [{"compute": 3.0, "bubble": 1.0}, {"compute": 2.5, "bubble": 1.5}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pictures.draw_split(ranks, f"{folder}/split.svg")
    ...     os.listdir(folder)
    ['split.svg']
    """
    parts = list(dict.fromkeys(part for times in ranks for part in times))
    if not parts:
        raise ArgumentError(
            "there is no time to divide",
            found=f"{len(ranks)} ranks without a part",
            expected="for each rank the seconds of each part",
        )
    for rank, times in enumerate(ranks):
        for part, seconds in times.items():
            if not is_number(seconds) or seconds < 0:
                raise ArgumentError(
                    "a part of the time is no duration",
                    rank=rank,
                    found=f"{part}: {seconds!r}",
                    expected="finite seconds of at least 0",
                )
    rows = [{part: float(times.get(part, 0.0)) for part in parts} for times in ranks]
    draw(path, lambda: _sheet(rows, looks_of_series(parts)))


def _sheet(rows: Sequence[Mapping[str, float]], looks: Mapping[str, Look]) -> Sheet:
    sheet, top = Sheet(), TOP
    totals = [sum(times.values()) for times in rows]
    sheet.title("Where the time went", f"{len(rows)} ranks, {sum(totals) / len(rows):.4g} s each on average")
    row = height_of_row(len(rows), ROW)
    named, bar = row >= LOW, NAMED_BAR if row >= LOW else BAR
    if not named:
        top = sheet.key(TOP, list(looks.values())) + 4
    axes = add_rows(sheet, top, len(rows), row, max(totals), right=RIGHT, middle=1 - GAP - bar / 2)
    axes.set_xlabel("seconds", fontsize=TEXT, labelpad=2)
    sheet.end_at(top + len(rows) * row + AXIS)
    unnamed = [part for part in looks if any(times[part] for times in rows)]
    for rank, times in enumerate(rows):
        start, y = 0.0, rank + 1 - GAP - bar / 2
        for part, look in looks.items():
            if not times[part]:
                continue
            edge = {"edgecolor": INK, "linewidth": 0.6, "hatch": look.hatch, "clip_on": False}
            axes.barh(y, times[part], bar, start, facecolor=look.colour, label=part, **edge)
            words = _fitting(sheet, part, times[part] / totals[rank], times[part] * _points(axes)) if named else ""
            if words.startswith(part) and part in unnamed:
                unnamed.remove(part)
            place = start + times[part] / 2, y
            axes.text(*place, words, color=ink_on(look.colour), fontsize=SMALL, ha="center", va="center_baseline")
            start += times[part]
    if named:
        _name_narrow_parts(sheet, rows, unnamed, _points(axes), top, row)
    return sheet


def _points(axes: Any) -> float:
    """Return the points of one second."""
    return (WIDTH - LEFT - RIGHT) / float(axes.get_xlim()[1])


def _fitting(sheet: Sheet, part: str, share: float, room: float) -> str:
    """Return the most that can stand in a part of a bar: its name and share, its name, its share, or nothing."""
    for words in (f"{part} {share:.0%}", part, f"{share:.0%}"):
        if sheet.width_of_words(words) * SMALL / TEXT + 4 <= room:
            return words
    return ""


def _name_narrow_parts(
    sheet: Sheet, rows: Sequence[Mapping[str, float]], parts: Sequence[str], points: float, top: float, row: float
) -> None:
    """Write the names that fit into no bar above the largest part of that name, and join the two."""
    for rank, mine in enumerate(_shared_out(rows, parts)):
        times = rows[rank]
        total, order = sum(times.values()), list(times)
        words = [f"{part} {times[part] / total:.1%}" for part in mine]
        before = [sum(times[other] for other in order[: order.index(part)]) for part in mine]
        ends = [LEFT + points * (start + times[part] / 2) for start, part in zip(before, mine)]
        wide = [sheet.width_of_words(text) * SMALL / TEXT + 10 for text in words]
        bar = top + (rank + 1 - GAP - NAMED_BAR) * row
        for x, end, text in zip(spread(ends, wide, MARGIN, WIDTH - MARGIN), ends, words):
            sheet.text(x, bar - 9, text, fontsize=SMALL, ha="center")
            sheet.ink.plot([end, end, x], [bar + 4, bar - 1, bar - 4], color=INK, linewidth=0.6)


def _shared_out(rows: Sequence[Mapping[str, float]], parts: Sequence[str]) -> list[list[str]]:
    """Return for each rank the parts that are named at its bar: each where it is large, and few at one bar."""
    named: list[list[str]] = [[] for _ in rows]
    for part in parts:
        large = 0.9 * max(times[part] for times in rows)
        candidates = [rank for rank, times in enumerate(rows) if times[part] >= large]
        named[min(candidates, key=lambda rank: len(named[rank]))].append(part)
    return named
