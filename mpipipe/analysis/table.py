"""The parts of the time as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from mpipipe.analysis.parts import PARTS
from mpipipe.text_table import text_table

MOST = 16  # ranks with a row of their own


def table(parts: Mapping[int, Mapping[str, float]]) -> str:
    """Return a table of {rank: {part: seconds}}: milliseconds of a step, and percent of it; without a final newline.

    Of more than 16 ranks, those with the most and the least compute are shown.
    """
    rows = [[str(rank), *_cells(parts[rank])] for rank in shown(parts)]
    if len(parts) > 1:
        rows.append(["mean", *_cells({part: fmean(each[part] for each in parts.values()) for part in PARTS})])
    return "\n".join(text_table(["rank", "step", *PARTS], rows, left=()))


def shown(parts: Mapping[int, Mapping[str, float]]) -> list[int]:
    """The ranks that have rows."""
    if len(parts) <= MOST:
        return sorted(parts)
    order = sorted(parts, key=lambda rank: parts[rank]["compute"])
    return sorted([*order[: MOST // 2], *order[-MOST // 2 :]])


def _cells(parts: Mapping[str, float]) -> list[str]:
    whole = sum(parts.values())
    return [f"{whole * 1e3:.1f} ms", *(f"{100 * parts[part] / whole:.1f} %" if whole else "" for part in PARTS)]
