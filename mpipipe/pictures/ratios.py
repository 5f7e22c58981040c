"""Ratios that were measured several times: a line from the least to the largest, with a dot at the median."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median

from mpipipe.pictures.sheet import INK, MARGIN, WIDTH, Sheet, draw

ROW, LABELS, NUMBERS = 20.0, 340.0, 50.0  # points
LONGEST = 62  # characters of a name
TICKS = (0.25, 0.5, 1, 2, 4)


def draw_ratios(ratios: Mapping[str, Sequence[float]], path: str | os.PathLike[str]) -> None:
    """Draw ratios around 1, on a logarithmic axis, below each other.

    Parameters
    ----------
    ratios : mapping from str to sequence of float
        For each name all that was measured, above 0, at least one.
    path : str or path
        Where the picture shall be: a PNG or an SVG.

    Raises
    ------
    ArgumentError, BackendError, StorageError
        As for `draw_timeline`.

    Examples
    --------
    >>> from mpipipe import pictures
    >>> pictures.draw_ratios({"a step": [0.9, 1.1, 0.95]}, "ratios.svg")
    """
    draw(path, lambda: _sheet(ratios))


def _sheet(ratios: Mapping[str, Sequence[float]]) -> Sheet:
    sheet = Sheet()
    sheet.title("Ratios", "1: as fast as what it is compared with")
    top, height = 30.0, ROW * len(ratios)
    axes = sheet.axes(LABELS, top, WIDTH - LABELS - NUMBERS - MARGIN, height)
    axes.set(ylim=(len(ratios) - 0.5, -0.5), yticks=[], xscale="log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    every = [0.8, 1.25, *(ratio for each in ratios.values() for ratio in each)]
    axes.set_xlim(min(every) / 1.1, max(every) * 1.1)
    axes.axvline(1, color=INK, linewidth=0.5)
    for place, (name, each) in enumerate(ratios.items()):
        middle, y = median(each), top + ROW * (place + 0.5)
        axes.plot([min(each), max(each)], [place, place], color=INK, linewidth=2)
        axes.plot([middle], [place], "o", color=INK, markersize=5)
        sheet.text(MARGIN, y, name if len(name) < LONGEST else f"{name[: LONGEST - 3]}...")
        sheet.text(WIDTH - MARGIN, y, f"{middle:.2f}", ha="right")
    sheet.end_at(top + height + 30)
    return sheet
