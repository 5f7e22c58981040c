"""A sheet of paper to draw on: sizes in points, a title, a key, axes, and the file that it becomes."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import ArgumentError, BackendError, StorageError
from mpipipe.pictures.colours import INK, Look, shade
from mpipipe.schedules import Schedule
from mpipipe.wording import counted, how_to_install

WIDTH, MARGIN = 548.0, 8.0  # points; the width of a page of documentation
TITLE, TEXT, SMALL = 10.5, 9.0, 8.0  # sizes of fonts
LINE = 16.0  # from one line of text to the next
SWATCH, SHADES = 10.0, 8  # points; most shades that a swatch shows
DOTS = 160  # of a PNG, per inch
FORMATS = {".png": "png", ".svg": "svg"}
SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # the first comes with matplotlib, the second is as wide
    "font.size": TEXT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "mpipipe",  # the same picture has the same names inside
}


class Sheet:
    """A figure in which all is placed in points from the top left corner; `end_at` says how high it is.

    Attributes
    ----------
    figure : the matplotlib.figure.Figure
    ink : axes over the whole sheet, in points, for title, key and labels
    height : points
    name : what a reader hears who cannot see the picture
    """

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.name = ""
        self.widths: dict[str, float] = {}  # of words, once they were measured
        self.figure = Figure(facecolor="white")
        self.places: list[tuple[Any, float, float, float, float]] = []
        self.ink = self.figure.add_axes((0, 0, 1, 1), facecolor="none")
        self.ink.set_axis_off()
        self.end_at(WIDTH)

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Return new axes at this place."""
        made = self.figure.add_axes((0, 0, 1, 1), facecolor="none", label=str(len(self.places)))
        self.places.append((made, left, top, width, height))
        self.end_at(self.height)
        return made

    def end_at(self, height: float) -> None:
        """Give the sheet this height."""
        self.height = height
        self.figure.set_size_inches(WIDTH / 72, height / 72)
        self.ink.set(xlim=(0, WIDTH), ylim=(height, 0))
        for axes, left, top, width, tall in self.places:
            axes.set_position((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))

    def text(self, x: float, y: float, text: str, **options: Any) -> Any:
        """Write one line of text whose middle is at the height `y`."""
        return self.ink.text(x, y, text, **{"va": "center", "fontsize": TEXT, **options})

    def title(self, left: str, right: str = "") -> None:
        """Write the first line: what it is, and what comes out."""
        self.name = left
        self.text(MARGIN, 12, left, fontsize=TITLE, fontweight="bold")
        self.text(WIDTH - MARGIN, 12, right, ha="right")

    def width_of(self, text: Any) -> float:
        """Return the width of a text in points."""
        return float(text.get_window_extent().width) * 72 / self.figure.dpi

    def width_of_words(self, words: str) -> float:
        """Return the width that `text` gives to words."""
        if words not in self.widths:
            text = self.text(0, 0, words)
            self.widths[words] = self.width_of(text)
            text.remove()
        return self.widths[words]

    def key(self, top: float, looks: Sequence[Look], chunks: int = 1, notes: Sequence[str] = ()) -> float:
        """Write what the colours mean, and return where it ends; a look has a swatch in the shade of each chunk."""
        from matplotlib.patches import Rectangle

        shades = min(chunks, SHADES)
        x, y = MARGIN, top + LINE / 2
        for look in (*looks, *(Look(note, "") for note in notes)):
            swatch = (SWATCH + 6 * (shades - 1) + 4) if look.colour else 0.0
            text = self.text(0, y, look.words)
            width = swatch + self.width_of(text)
            if x + width > WIDTH - MARGIN and x > MARGIN:
                x, y = MARGIN, y + LINE
            text.set_position((x + swatch, y))
            for part in range(shades if look.colour else 0):
                step = (swatch - 4) / shades
                fill = shade(look.colour, part, shades)
                box = Rectangle((x + part * step, y - SWATCH / 2), step, SWATCH, facecolor=fill, hatch=look.hatch)
                box.set(edgecolor=INK, linewidth=0.5)
                self.ink.add_patch(box)
            x += width + 14
        return y + LINE / 2


def draw(path: str | os.PathLike[str], make: Callable[[], Sheet]) -> None:
    """Draw what `make` draws, and write it; all that can be wrong with the file is found before."""
    target, kind = _target(path)
    style = _library()
    with style.context(["default", SETTINGS]):  # whatever the user's matplotlibrc says
        sheet, content = make(), io.BytesIO()
        metadata: dict[str, str | None] = {"Title": sheet.name}
        metadata |= {"Date": None, "Creator": "mpipipe"} if kind == "svg" else {"Software": "mpipipe"}
        sheet.figure.savefig(content, format=kind, dpi=DOTS, metadata=metadata)
    try:
        files.write_whole(target, content.getvalue())
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error


def check_can_draw(path: str | os.PathLike[str]) -> None:
    """Check that a picture can be written there, before anything is computed for it.

    Parameters
    ----------
    path : str or path
        Where the picture shall be.

    Raises
    ------
    ArgumentError
        The name ends neither in .png nor in .svg.
    BackendError
        Matplotlib (extra ``[plot]``) is not installed.
    StorageError
        There is no such folder, or it may not be written to.

    Examples
    --------
    >>> from mpipipe import pictures
    >>> pictures.check_can_draw("schedule.png")
    """
    _target(path)
    _library()


def _target(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return path and format of a picture, or raise."""
    target = Path(path)
    kind = FORMATS.get(target.suffix.lower())
    if kind is None:
        raise ArgumentError(
            "a picture is written as PNG or SVG",
            found=str(target),
            expected="a name that ends in .png or .svg",
            remedy="choose such a name",
        )
    if not files.is_folder(target.parent):
        raise _unwritable(target, "there is no such folder")
    if files.is_folder(target):
        raise _unwritable(target, "it is a folder")
    if not os.access(target.parent, os.W_OK):
        raise _unwritable(target, "the folder may not be written to")
    return target, kind


def subject(schedule: Schedule) -> str:
    """Return what a picture of one schedule is called."""
    return f"{schedule.name}: {counted(schedule.ranks, 'rank')}, {counted(schedule.microbatches, 'micro-batch')}"


def is_number(value: object) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def _library() -> Any:
    try:
        from matplotlib import style
    except ImportError as error:
        raise BackendError(
            f"the library matplotlib cannot be imported: {error}",
            expected="it, to draw pictures",
            remedy=f"{how_to_install('plot')}; schedules.timeline draws a schedule as text without it",
        ) from error
    return style


def _unwritable(path: Path, why: str) -> StorageError:
    return StorageError(
        f"the picture cannot be written: {why}",
        found=str(path),
        expected="a file in a folder that is there and may be written to",
        remedy="make the folder, or choose another one",
    )
