"""The parts of the time as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from statistics import fmean

from mpipipe.analysis.parts import PARTS

MOST = 16  # ranks with a row of their own
WIDTH = 110


def table(parts: Mapping[int, Mapping[str, float]]) -> str:
    """Return a table of {rank: {part: seconds}}: milliseconds of a step, and percent of it; without a final newline.

    Of more than 16 ranks, those with the most and the least compute are shown.
    """
    from rich.box import SIMPLE_HEAD  # imported where a table is made: it takes time
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("rank", "step", *PARTS):
        drawn.add_column(title, justify="right")
    for rank in shown(parts):
        drawn.add_row(str(rank), *_cells(parts[rank]))
    if len(parts) > 1:
        drawn.add_section()
        drawn.add_row("mean", *_cells({part: fmean(each[part] for each in parts.values()) for part in PARTS}))
    text = StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def shown(parts: Mapping[int, Mapping[str, float]]) -> list[int]:
    """The ranks that have rows."""
    if len(parts) <= MOST:
        return sorted(parts)
    order = sorted(parts, key=lambda rank: parts[rank]["compute"])
    return sorted([*order[: MOST // 2], *order[-MOST // 2 :]])


def _cells(parts: Mapping[str, float]) -> list[str]:
    whole = sum(parts.values())
    return [f"{whole * 1e3:.1f} ms", *(f"{100 * parts[part] / whole:.1f} %" if whole else "" for part in PARTS)]
