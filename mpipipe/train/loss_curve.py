"""The losses of a whole training as a picture: in characters for a terminal, and as loss.png."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpipipe.train import metrics
from mpipipe.wording import counted

LEAST = 8  # losses of training, of which there is a curve to see
WIDTH, HEIGHT = 72, 12  # characters of the picture, without its axes
MARKS = {"loss": "*", "validation": "o"}  # the second is drawn over the first
NAME = "loss.png"

Points = Mapping[str, Sequence[tuple[int, float]]]  # (step, loss), by the name of the loss


def read_points(out: Path, step: int) -> Points | None:
    """Return the losses in the metrics of an output folder up to a step; None if they are too few for a curve.

    Raises ConfigError if the metrics cannot be read.
    """
    kept, _ = metrics.kept_records(out, step)
    records = [json.loads(line) for line in kept.splitlines()]
    points = {
        name: [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
        for name in MARKS
    }
    return points if len(points["loss"]) >= LEAST else None


def in_characters(points: Points) -> str:
    """Draw losses over steps, with lines no longer than 90 characters.

    Parameters
    ----------
    points : mapping
        As `read_points` returns them; at least one point.

    Returns
    -------
    str
        Several lines. All characters are in ASCII.

    Examples
    --------
    >>> from mpipipe.train.loss_curve import in_characters
    >>> points = {"loss": [(1, 4.0), (50, 3.0), (100, 2.5)], "validation": [(100, 2.0)]}
    >>> print(in_characters(points))  # doctest: +ELLIPSIS
    --- loss of training (*) and of validation (o) over 100 steps
     4.0000 |*
    ...
     2.0000 |                                                                       o
    """
    steps = [step for each in points.values() for step, _ in each]
    values = [value for each in points.values() for _, value in each]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for name, mark in MARKS.items():
        for step, value in points[name]:
            column = round((step - first) / max(last - first, 1) * (WIDTH - 1))
            row = round((high - value) / ((high - low) or 1.0) * (HEIGHT - 1))
            grid[row][column] = mark
    labels = {0: f"{high:>7.4f}", HEIGHT - 1: f"{low:>7.4f}"}
    lines = [f"{labels.get(row, ''):>7} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    return "\n".join([f"--- loss of training (*) and of validation (o) over {counted(last, 'step')}", *lines])


def draw_png(points: Points, path: Path) -> bool:
    """Draw losses over steps as a PNG, where matplotlib is installed; return whether it is. Raises OSError.

    Parameters
    ----------
    points : as `read_points` returns them
    path : of the file
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    axes.plot(*zip(*points["loss"]), label="training")
    if points["validation"]:
        axes.plot(*zip(*points["validation"]), "o-", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.print_figure(path, dpi=120)
    return True
