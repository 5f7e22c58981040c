"""What an SVG of `mpipipe.tracing` shows: its texts, and its shapes with their colours and places."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SPACE = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"-?[0-9.]+")


class Shape(NamedTuple):
    """A filled path: its colour, and the box around it."""

    fill: str
    left: float
    top: float
    right: float
    bottom: float


class Text(NamedTuple):
    """A text, and where it stands."""

    words: str
    x: float
    y: float


def texts(path: Path) -> list[Text]:
    """All texts, in the order of the file."""
    found = ElementTree.parse(path).getroot().iter(f"{SPACE}text")
    return [Text("".join(text.itertext()), float(text.get("x")), float(text.get("y"))) for text in found]


def shapes(path: Path, fill: str | None = None) -> list[Shape]:
    """All paths that are filled with a colour, or with this one, in the order of the file."""
    found = []
    for element in ElementTree.parse(path).getroot().iter(f"{SPACE}path"):
        colour = re.search(r"fill: (#\w+)", element.get("style", ""))
        numbers = [float(number) for number in NUMBER.findall(element.get("d", ""))]
        if colour and (fill is None or colour.group(1) == fill):
            xs, ys = numbers[::2], numbers[1::2]
            found.append(Shape(colour.group(1), min(xs), min(ys), max(xs), max(ys)))
    return found


def content(path: Path) -> tuple[str, list[str], Counter]:
    """What a picture shows, whatever version of matplotlib has drawn it: title, texts, and shapes of each colour."""
    root = ElementTree.parse(path).getroot()
    title = root.find(f"{SPACE}title")
    styles = [element.get("style", "") for kind in ("path", "use") for element in root.iter(SPACE + kind)]
    colours = Counter(re.sub(r".*?(fill|stroke): (#\w+).*", r"\1 \2", style) for style in styles if "#" in style)
    return title.text, [text.words for text in texts(path)], colours
