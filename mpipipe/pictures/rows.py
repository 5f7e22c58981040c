"""A row for each rank over one axis of time, as timelines and profiles of memory have it."""

from __future__ import annotations

from typing import Any

from mpipipe.errors import ArgumentError
from mpipipe.pictures.sheet import SMALL, TEXT, WIDTH, Sheet
from mpipipe.wording import counted

LEFT, RIGHT = 54.0, 14.0  # points: for the names of ranks, and for the last number of the axis
TALLEST = 720.0  # points of all rows
NAMES_APART = 10.0  # points
AXIS = 36.0  # points below the rows, for numbers and name of the axis of time
MOST_BOXES = 100_000  # more than a picture has room for; drawing them takes several seconds


def check_boxes(count: int) -> None:
    """Raise ArgumentError if there are more actions than a picture can show."""
    if count > MOST_BOXES:
        raise ArgumentError(
            "there are more actions than a picture can show",
            found=counted(count, "action"),
            expected=f"at most {MOST_BOXES}",
            remedy="draw fewer ranks or micro-batches: a schedule repeats itself; or take schedules.chrome_trace",
        )


def height_of_row(rows: int, wanted: float) -> float:
    """Return the points from one row to the next."""
    return min(wanted, TALLEST / rows)


def add_rows(
    sheet: Sheet, top: float, ranks: int, row: float, longest: float, *, right: float = RIGHT, middle: float = 0.5
) -> Any:
    """Return axes with rank r between r and r + 1 downwards, its name at r + `middle`, and time from 0 to `longest`."""
    axes = sheet.axes(LEFT, top, WIDTH - LEFT - right, ranks * row)
    axes.set(xlim=(0, longest or 1.0), ylim=(ranks, 0))
    every = int(-(-NAMES_APART // row))
    named = range(0, ranks, every)
    axes.set_yticks([rank + middle for rank in named], [f"rank {rank}" for rank in named], fontsize=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=SMALL)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    return axes


def name_time(axes: Any, unit: str = "the unit of the costs") -> None:
    """Name the axis of time."""
    axes.set_xlabel(f"time, in {unit}", fontsize=TEXT, labelpad=2)


def hide_time(axes: Any) -> None:
    """Leave the numbers to the panel below."""
    axes.tick_params(axis="x", labelbottom=False)
