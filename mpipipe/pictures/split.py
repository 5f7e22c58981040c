"""What the time of each rank was spent on, as a stacked bar for each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.pictures import sheet as paper
from mpipipe.text import counted

ROW, TOP, RIGHT = 40.0, 26.0, 14.0  # points
NAMED_BAR, BAR, GAP = 0.5, 0.84, 0.08  # of the height of a row: with names of narrow parts above it, without; below it
LOW = 32.0  # points of a row below which nothing is written at its parts, so that a key says what the colours are
SCALE = paper.SMALL / paper.TEXT  # from the width of words to that in the small font

Rows = Sequence[Mapping[str, float]]  # for each rank the seconds of every part, in the order in which they stand


class Label(NamedTuple):
    """What is written at a part: how wide it is with the room around it, in points, and whether it names the part."""

    part: str
    words: str
    width: float
    has_name: bool


def draw_split(ranks: Sequence[Mapping[str, float]], path: str | os.PathLike[str]) -> None:
    """Draw for each rank a bar of the parts of its time, with the names at the parts.

    A name stands in each part that has room for it; one that fits nowhere stands above the part where it is largest.

    Parameters
    ----------
    ranks : sequence of mappings of str to float
        For each rank the seconds of each part. Parts stand in the order in which they are first named.
    path : str or path
        As for `draw_timeline`, and the same errors.

    Examples
    --------
    >>> import os, tempfile
    >>> from mpipipe import pictures
    >>> ranks = [{"compute": 3.0, "bubble": 1.0}, {"compute": 2.5, "bubble": 1.5}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pictures.draw_split(ranks, f"{folder}/split.svg")
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
            if not paper.is_number(seconds) or seconds < 0:
                raise ArgumentError(
                    "a part of the time is no duration",
                    rank=rank,
                    found=f"{part}: {seconds!r}",
                    expected="finite seconds of at least 0",
                )
    rows = [{part: float(times.get(part, 0.0)) for part in parts} for times in ranks]
    paper.draw(path, lambda: _sheet(rows, paper.looks_of_series(parts)))


def _sheet(rows: Rows, looks: Mapping[str, paper.Look]) -> paper.Sheet:
    sheet, top, row = paper.Sheet(), TOP, paper.height_of_row(len(rows), ROW)
    totals = [sum(times.values()) for times in rows]
    mean = sum(totals) / len(rows)
    sheet.title("Where the time went", f"{counted(len(rows), 'rank')}, {mean:.4g} s each on average")
    points = (paper.WIDTH - paper.LEFT - RIGHT) / (max(totals) or 1.0)  # of one second
    inside = [_inside(sheet, times, points) for times in rows]
    unnamed = [part for part in looks if any(t[part] for t in rows) and not any(i[part].has_name for i in inside)]
    above = [_above(sheet, times, mine) for times, mine in zip(rows, _shared_out(rows, unnamed))]
    widest = max(sum(label.width for label in labels) for labels in above)
    named = row >= LOW and widest <= paper.WIDTH - 2 * paper.MARGIN
    bar = NAMED_BAR if named else BAR
    if not named:
        top = sheet.key(TOP, list(looks.values())) + 4
    axes = paper.add_rows(sheet, top, len(rows), row, max(totals), right=RIGHT, middle=1 - GAP - bar / 2)
    axes.set_xlabel("seconds", fontsize=paper.TEXT, labelpad=2)
    sheet.end_at(top + len(rows) * row + paper.AXIS)
    for rank, times in enumerate(rows):
        start, y = 0.0, rank + 1 - GAP - bar / 2
        for part, look in looks.items():
            if times[part]:
                edge = {"edgecolor": paper.INK, "linewidth": 0.6, "hatch": look.hatch, "clip_on": False}
                axes.barh(y, times[part], bar, start, facecolor=look.colour, label=part, **edge)
                if row >= LOW:
                    style = {"color": paper.ink_on(look.colour), "ha": "center", "va": "center_baseline"}
                    words = inside[rank][part].words
                    axes.text(start + times[part] / 2, y, words, fontsize=paper.SMALL, **style)
                start += times[part]
        if named:
            _write_above(sheet, times, above[rank], points, top + (rank + 1 - GAP - NAMED_BAR) * row)
    return sheet


def _inside(sheet: paper.Sheet, times: Mapping[str, float], points: float) -> dict[str, Label]:
    """Return the most that can stand in each part of a bar: its name and share, its name, its share, or nothing."""
    total, labels = sum(times.values()), {}
    for part, seconds in times.items():
        share = f"{seconds / total:.0%}" if total else ""
        for words, has_name in ((f"{part} {share}", True), (part, True), (share, False)):
            labels[part] = Label(part, words, sheet.width_of_words(words) * SCALE + 4, has_name)
            if labels[part].width <= seconds * points:
                break
        else:
            labels[part] = Label(part, "", 0.0, False)
    return labels


def _above(sheet: paper.Sheet, times: Mapping[str, float], parts: Sequence[str]) -> list[Label]:
    """Return what is written above a bar."""
    total = sum(times.values())
    words = {part: f"{part} {times[part] / total:.1%}" for part in parts}
    return [Label(part, text, sheet.width_of_words(text) * SCALE + 10, True) for part, text in words.items()]


def _write_above(
    sheet: paper.Sheet, times: Mapping[str, float], labels: Sequence[Label], points: float, bar: float
) -> None:
    """Write the names of narrow parts above their bar, and join the two."""
    order = list(times)
    before = [sum(times[other] for other in order[: order.index(label.part)]) for label in labels]
    ends = [paper.LEFT + points * (start + times[label.part] / 2) for start, label in zip(before, labels)]
    places = paper.spread(ends, [label.width for label in labels], paper.MARGIN, paper.WIDTH - paper.MARGIN)
    for x, end, label in zip(places, ends, labels):
        sheet.text(x, bar - 9, label.words, fontsize=paper.SMALL, ha="center")
        sheet.ink.plot([end, end, x], [bar + 4, bar - 1, bar - 4], color=paper.INK, linewidth=0.6)


def _shared_out(rows: Rows, parts: Sequence[str]) -> list[list[str]]:
    """Return for each rank the parts that are named at its bar: each where it is large, and few at one bar."""
    named: list[list[str]] = [[] for _ in rows]
    for part in parts:
        large = 0.9 * max(times[part] for times in rows)
        candidates = [rank for rank, times in enumerate(rows) if times[part] >= large]
        named[min(candidates, key=lambda rank: len(named[rank]))].append(part)
    return named
