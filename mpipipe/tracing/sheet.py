"""A sheet to draw on: sizes in points, a title, a key, axes, and its file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpipipe import files
from mpipipe.errors import ArgumentError, StorageError
from mpipipe.schedules import Schedule, Timeline
from mpipipe.text import counted, optional_library

# -- Colours that readers who are colour-blind tell apart, and that differ in lightness on paper ---
#
# They are those of Okabe and Ito, "Color Universal Design" (2008),
# https://jfly.uni-koeln.de/color/.


ORANGE = "#e69f00"
SKY_BLUE = "#56b4e9"
GREEN = "#009e73"
BLUE = "#0072b2"
PURPLE = "#cc79a7"
GREY = "#8c8c8c"
PALE = "#d0d4d8"
WHITE = "#ffffff"
BLACK = "#000000"
INK = "#22313f"
LIGHTEST = 0.55  # how much white is in the lightest shade


class Look(NamedTuple):
    """How one kind of box is drawn: what the key calls it, and its colour."""

    words: str
    colour: str


# R is work that is done a second time, so it has no hue of its own
OPS = {
    "F": Look("forward", SKY_BLUE),
    "B": Look("backward", GREEN),
    "I": Look("input gradient", PURPLE),
    "W": Look("weight gradient", ORANGE),
    "R": Look("recomputation", GREY),
}


def shade(colour: str, chunk: int, chunks: int) -> str:
    """Return the colour for a chunk: the first has it as it is, the last has the lightest shade."""
    white = LIGHTEST * chunk / max(1, chunks - 1)
    shaded = [round(part + (255 - part) * white) for part in bytes.fromhex(colour[1:])]
    return f"#{bytes(shaded).hex()}"


# -- A sheet: sizes in points, a title, a key, axes, and its file ----------------------------------


# points; the width of a page of documentation
WIDTH = 548.0
MARGIN = 8.0
# sizes of fonts
TITLE = 10.5
TEXT = 9.0
SMALL = 8.0
LINE = 16.0  # distance of two lines of text
SWATCH = 10.0  # points
DOTS = 160  # dots of a PNG per inch
FORMATS = {".png": "png", ".svg": "svg"}
SETTINGS = {
    "font.family": "sans-serif",
    # The first comes with matplotlib, the second is as wide.
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": TEXT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "mpipipe",  # the same picture has the same names inside
}


class Sheet:
    """A figure placed in points from the top left corner; `add_rows` says how high it is.

    `ink` are axes over the whole sheet, in points, for title, key and labels. `name` is what a
    reader hears who cannot see the picture.
    """

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.name = ""
        self.figure = Figure(facecolor="white")
        self.ink = self.figure.add_axes((0, 0, 1, 1), facecolor="none")
        self.ink.set_axis_off()

    def text(self, x: float, y: float, text: str, **options: Any) -> Any:
        """Write one line of text whose middle is at the height `y`."""
        return self.ink.text(x, y, text, **{"va": "center", "fontsize": TEXT, **options})

    def title(self, schedule: Schedule, right: str) -> None:
        """Write the first line: what it is, and what comes out."""
        self.name = f"{schedule.name}: {counted(schedule.ranks, 'rank')}, {schedule.batch}"
        self.text(MARGIN, 12, self.name, fontsize=TITLE, fontweight="bold")
        self.text(WIDTH - MARGIN, 12, right, ha="right")

    def width_of(self, text: Any) -> float:
        """Return the width of a text in points."""
        return float(text.get_window_extent().width) * 72 / self.figure.dpi

    def key(self, top: float, looks: Sequence[Look], notes: Sequence[str]) -> float:
        """Write what the colours mean, and return where it ends."""
        from matplotlib.patches import Rectangle

        x = MARGIN
        y = top + LINE / 2
        for look in (*looks, *(Look(note, "") for note in notes)):
            swatch = 0.0
            if look.colour:
                swatch = SWATCH + 4
            text = self.text(0, y, look.words)
            width = swatch + self.width_of(text)
            if x + width > WIDTH - MARGIN and x > MARGIN:
                x = MARGIN
                y = y + LINE
            text.set_position((x + swatch, y))
            if look.colour:
                box = Rectangle((x, y - SWATCH / 2), SWATCH, SWATCH, facecolor=look.colour)
                box.set(edgecolor=INK, linewidth=0.5)
                self.ink.add_patch(box)
            x += width + 14
        return y + LINE / 2


def draw(
    path: str | os.PathLike[str], timeline: Timeline, make: Callable[[Timeline], Sheet]
) -> None:
    """Draw a timeline by `make`, and write it."""
    boxes = sum(map(len, timeline.spans))
    if boxes > MOST_BOXES:
        raise ArgumentError(
            "there are more actions than a picture can show",
            found=counted(boxes, "action"),
            expected=f"at most {MOST_BOXES}",
            remedy="draw fewer ranks or micro-batches: a schedule repeats itself",
        )
    kind = _format(path)
    with _library().context(["default", SETTINGS]):  # whatever the user's matplotlibrc says
        sheet = make(timeline)
        content = io.BytesIO()
        metadata: dict[str, str | None] = {"Title": sheet.name}
        if kind == "svg":
            metadata |= {"Date": None, "Creator": "mpipipe"}
        sheet.figure.savefig(content, format=kind, dpi=DOTS, metadata=metadata)
    target = Path(path)
    with files.writing(
        "the picture",
        target,
        error=StorageError,
        expected="a file in a folder that is there and may be written to",
        remedy="make the folder, or choose another one",
    ):
        files.write_whole(target, content.getvalue())


def check_can_draw(path: str | os.PathLike[str]) -> None:
    """Check that a picture can be written, before anything is computed for it.

    Examples
    --------
    >>> from mpipipe import tracing
    >>> tracing.check_can_draw("schedule.png")
    """
    _format(path)
    _library()


def _format(path: str | os.PathLike[str]) -> str:
    """Return the format of a picture, by the end of its name."""
    kind = FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise ArgumentError(
            "a picture is written as PNG or SVG",
            found=str(path),
            expected="a name that ends in .png or .svg",
            remedy="choose such a name",
        )
    return kind


def _library() -> Any:
    return optional_library(
        "matplotlib.style",
        "draw pictures",
        "plot",
        "; schedules.timeline draws a schedule as text without it",
    )


# -- A row for each rank over one axis of time, as timelines and profiles of memory have it --------


# points: for the names of ranks, and for the last number of the axis
LEFT = 54.0
RIGHT = 14.0
TALLEST = 720.0  # points of all rows
NAMES_APART = 10.0  # points
AXIS = 36.0  # points below the rows, for numbers and name of the axis of time
MOST_BOXES = 100_000  # more than a picture has room for; drawing them takes several seconds


def add_rows(
    sheet: Sheet, top: float, timeline: Timeline, wanted: float, right: float = RIGHT
) -> tuple[Any, float]:
    """Return axes with rank r between r and r + 1 downwards, and the points of a row.

    They are the last of the sheet; `wanted` are the points of a row if there are few.
    """
    ranks = timeline.schedule.ranks
    row = min(wanted, TALLEST / ranks)
    rows = ranks * row
    height = top + rows + AXIS
    sheet.figure.set_size_inches(WIDTH / 72, height / 72)
    sheet.ink.set(xlim=(0, WIDTH), ylim=(height, 0))
    place = LEFT / WIDTH, 1 - (top + rows) / height, (WIDTH - LEFT - right) / WIDTH, rows / height
    axes = sheet.figure.add_axes(place, facecolor="none", label="0")
    axes.set(xlim=(0, timeline.makespan or 1.0), ylim=(ranks, 0))
    axes.set_xlabel("time, in the unit of the costs", fontsize=TEXT, labelpad=2)
    every = int(-(-NAMES_APART // row))
    named = range(0, ranks, every)
    middles = [rank + 0.5 for rank in named]
    axes.set_yticks(middles, [f"rank {rank}" for rank in named], fontsize=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=SMALL)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    return axes, row
