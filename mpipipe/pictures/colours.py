"""Colours that readers who are colour-blind tell apart, and that differ in lightness on paper.

They are those of Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ORANGE, SKY_BLUE, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE, BLACK = "#0072b2", "#d55e00", "#cc79a7", "#000000"
GREY, PALE, WHITE, INK = "#595959", "#d0d4d8", "#ffffff", "#22313f"
# R is work that is done a second time, so it has no hue of its own
OPS = {
    "F": ("forward", SKY_BLUE),
    "B": ("backward", GREEN),
    "I": ("input gradient", PURPLE),
    "W": ("weight gradient", ORANGE),
    "R": ("recomputation", GREY),
}
SERIES = (GREEN, SKY_BLUE, ORANGE, PURPLE, YELLOW, VERMILION, BLUE, "#999999")
OTHERS = (YELLOW, BLUE, VERMILION)  # for what is no op of a schedule
HATCHES = ("", "///", "...", "xxx")  # where colours come again
LIGHTEST = 0.55  # how much white is in the lightest shade


class Look(NamedTuple):
    """How one kind of box is drawn: what the key calls it, its colour, and lines across it where colours come again."""

    words: str
    colour: str
    hatch: str = ""


def looks_of_ops(labels: Iterable[str]) -> dict[str, Look]:
    """Return the looks of ops, in the order of a step, and of other labels behind them, in their own order."""
    given = list(dict.fromkeys(labels))
    looks = {op: Look(words, colour) for op, (words, colour) in OPS.items() if op in given}
    others = [label for label in given if label not in OPS]
    return looks | {label: Look(label, *_repeated(OTHERS, place)) for place, label in enumerate(others)}


def looks_of_series(labels: Iterable[str]) -> dict[str, Look]:
    """Return a look for each label, in their order."""
    return {label: Look(label, *_repeated(SERIES, place)) for place, label in enumerate(dict.fromkeys(labels))}


def shade(colour: str, chunk: int, chunks: int) -> str:
    """Return the colour for a chunk: the first has it as it is, the last has the lightest shade."""
    white = LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return _mixed(colour, 255, white)


def darker(colour: str, times: int) -> str:
    """Return the colour for the `times`-th time that it is used, for lines, which have no hatches."""
    return _mixed(colour, 0, min(0.75, 0.4 * times))


def ink_on(colour: str) -> str:
    """Return black or white, whichever is easier to read on the colour (contrast of WCAG 2)."""
    light = sum(part * weight for part, weight in zip(map(_linear, _parts(colour)), (0.2126, 0.7152, 0.0722)))
    return BLACK if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else WHITE


def _repeated(colours: tuple[str, ...], place: int) -> tuple[str, str]:
    return colours[place % len(colours)], HATCHES[place // len(colours) % len(HATCHES)]


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mixed(colour: str, other: int, amount: float) -> str:
    return "#" + "".join(f"{round(part + (other - part) * amount):02x}" for part in _parts(colour))


def _linear(part: int) -> float:
    value = part / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
