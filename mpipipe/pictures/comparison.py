"""Bubble and peak memory of several schedules over the number of micro-batches."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.pictures import sheet as paper
from mpipipe.schedules import EQUAL_COSTS, ONE_STAGE, SEVERAL_STAGES, TWO_STAGES, Costs, Timeline, by_name, simulate
from mpipipe.text import counted

TOP, LEFT, PANEL, NAME, BETWEEN = 24.0, 40.0, 180.0, 20.0, 22.0  # points
APART, LEADER, NUMBERS_APART = 11.5, 34.0, 18.0  # points: names of two lines; from a line to its name; of the axis
COLOURS = tuple(colour for colour in paper.SERIES if colour != paper.YELLOW)  # which is too light for a line on white
DASH = 3.0  # in widths of a line
BESIDE = 0.03  # of the axis, left of the first points
LOGARITHMIC = 4  # times the smallest number of micro-batches, from where on an even axis would crowd the small ones

Points = Mapping[str, Sequence[tuple[int, float]]]  # name of a schedule -> (micro-batches, value)


class Panel(NamedTuple):
    """One of the two panels: what it shows, and whether its values grow by factors, as micro-batches do."""

    words: str
    points: Points
    by_factors: bool


def simulate_all(
    ranks: int,
    microbatches: Iterable[int],
    names: Iterable[str] | None = None,
    chunks: int = 2,
    costs: Costs = EQUAL_COSTS,
) -> list[Timeline]:
    """Simulate schedules with every number of micro-batches, each with the same work on a rank.

    Parameters
    ----------
    ranks : int
        P, at least 1.
    microbatches : iterable of int
        Numbers of micro-batches.
    names : iterable of str, optional
        Schedules that `schedules.by_name` knows; by default all that train.
    chunks : int, optional
        V of the schedules that take any number of stages per rank.
    costs : Costs, optional
        Times of all stages of a rank together, as numbers: a stage has the V-th part of them. `transfer` is the
        time of one message.

    Returns
    -------
    list of Timeline
        One for each schedule and number of micro-batches.

    Examples
    --------
    >>> from mpipipe import pictures
    >>> found = pictures.simulate_all(4, [4, 8], names=["gpipe", "zero_bubble_v"])
    >>> [(timeline.schedule.name, timeline.makespan) for timeline in found]
    [('gpipe', 21.0), ('gpipe', 33.0), ('zero_bubble_v', 15.0), ('zero_bubble_v', 25.5)]
    """
    for entry in fields(costs):
        if getattr(costs, entry.name) is not None and not paper.is_number(getattr(costs, entry.name)):
            raise ArgumentError(
                f"the cost {entry.name} is no number",
                found=repr(getattr(costs, entry.name)),
                expected="one finite number: the schedules have different numbers of stages",
            )
    known = [name for name in (*ONE_STAGE, *SEVERAL_STAGES, *TWO_STAGES) if name != "forward_only"]
    found, counts = [], list(microbatches)
    for name in known if names is None else names:
        stages = 2 if name in TWO_STAGES else 1 if name in ONE_STAGE else chunks
        of_rank = {kind: getattr(costs, kind) for kind in ("forward", "input_grad", "weight_grad")}
        of_stage = replace(costs, **{kind: time / stages for kind, time in of_rank.items()})
        for count in counts:
            schedule = by_name(name, ranks=ranks, microbatches=count, chunks=stages, costs=of_stage)
            found.append(simulate(schedule, of_stage))
    return found


def draw_comparison(timelines: Iterable[Timeline], path: str | os.PathLike[str]) -> None:
    """Draw bubble and peak memory of schedules over the number of micro-batches, with the names next to the lines.

    The memory is the largest number of activations on any rank, each of all stages of a rank: that of V chunks counts
    as one. Schedules with the same values share a line whose dashes have their colours in turn.

    Parameters
    ----------
    timelines : iterable of Timeline
        As `simulate_all` returns them, or your own, of one number of ranks. Those of the same name are one line.
    path : str or path
        As for `draw_timeline`, and the same errors.
    """
    given = list(timelines)
    ranks = sorted({timeline.schedule.ranks for timeline in given})
    if len(ranks) != 1:
        raise ArgumentError(
            "schedules can be compared on one number of ranks",
            found="no timeline" if not ranks else f"timelines of {', '.join(map(str, ranks))} ranks",
            expected="timelines of one number of ranks",
        )
    bubbles: dict[str, dict[int, float]] = defaultdict(dict)
    peaks: dict[str, dict[int, float]] = defaultdict(dict)
    for timeline in given:
        schedule = timeline.schedule
        if schedule.microbatches in bubbles[schedule.name]:
            raise ArgumentError(
                "two timelines are for one point of the picture",
                found=f"{schedule.name} with {counted(schedule.microbatches, 'micro-batch')}, twice",
                expected="one timeline for each name and number of micro-batches",
                remedy="give one of them another name: dataclasses.replace(schedule, name=...)",
            )
        bubbles[schedule.name][schedule.microbatches] = 100 * timeline.bubble_fraction
        peaks[schedule.name][schedule.microbatches] = max(timeline.peak_activations) / schedule.chunks
    lines = [{name: sorted(line.items()) for name, line in each.items()} for each in (bubbles, peaks)]
    panels = [
        Panel("bubble, % of the time", lines[0], False),
        Panel("peak memory, activations of all stages of a rank", lines[1], True),
    ]
    paper.draw(path, lambda: _sheet(panels, ranks[0]))


def _sheet(panels: Sequence[Panel], ranks: int) -> paper.Sheet:
    sheet, top = paper.Sheet(), TOP
    names = list(panels[0].points)
    sheet.title(f"{counted(len(names), 'schedule')} on {counted(ranks, 'rank')}")
    room = LEADER + paper.MARGIN + max(map(sheet.width_of_words, names))
    height = max(PANEL, APART * (len(names) + 1))
    for panel in panels:
        sheet.text(paper.MARGIN, top + NAME / 2, panel.words)
        axes = sheet.axes(LEFT, top + NAME, paper.WIDTH - LEFT - room, height)
        _scale(axes, panel, paper.WIDTH - LEFT - room)
        _draw_lines(axes, panel.points)
        _name_lines(sheet, axes, panel.points, top + NAME, height)
        top += NAME + height + BETWEEN
    axes.set_xlabel("micro-batches", fontsize=paper.TEXT, labelpad=2)
    sheet.end_at(top + 14)
    return sheet


def _scale(axes: Any, panel: Panel, width: float) -> None:
    """Choose limits, scales and the numbers at the axes."""
    axes.tick_params(labelsize=paper.SMALL)
    axes.grid(color=paper.PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    counts = sorted({count for line in panel.points.values() for count, _ in line})
    values = [value for line in panel.points.values() for _, value in line]
    few, many, low, high = counts[0], counts[-1], min(values), max(values)
    if many >= LOGARITHMIC * few:
        axes.set_xscale("log", base=2)
        axes.set_xlim(few / (many / few) ** BESIDE, many)
    else:
        axes.set_xlim(few - (BESIDE * (many - few) or 1), many)
    kept: list[int] = []
    for count in counts:
        places = axes.transData.transform([(count, 1), (kept[-1] if kept else count, 1)])[:, 0]
        if not kept or (places[0] - places[1]) * 72 / axes.figure.dpi > NUMBERS_APART:
            kept.append(count)
    axes.set_xticks(kept, [str(count) for count in kept])
    axes.set_xticks([], minor=True)
    if panel.by_factors and low > 0 and high > LOGARITHMIC * low:
        axes.set_yscale("log", base=2)
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        axes.set_yticks([2.0**power for power in powers], [f"{2.0**power:g}" for power in powers])
        axes.set_ylim(2.0 ** (powers[0] - 0.2), 2.0 ** (powers[-1] + 0.1))
    else:
        axes.set_ylim(0, 1.04 * high or 1.0)


def _draw_lines(axes: Any, points: Points) -> None:
    """Draw the lines; where several run over each other, each has its turn of the dashes."""
    segments: dict[tuple[tuple[int, float], tuple[int, float]], list[str]] = defaultdict(list)
    places: dict[tuple[int, float], list[str]] = defaultdict(list)
    for name, line in points.items():
        rounded = [(count, round(value, 6)) for count, value in line]
        for point in rounded:
            places[point].append(name)
        for begin, end in pairwise(rounded):
            segments[begin, end].append(name)
    for segment, names in segments.items():
        for turn, name in enumerate(names):
            dash = (turn * DASH, (DASH, DASH * (len(names) - 1))) if len(names) > 1 else "solid"
            axes.plot(*zip(*segment), color=_colour(points, name), linestyle=dash, linewidth=1.8, label=name)
    for point, names in places.items():
        colour = _colour(points, names[0]) if len(names) == 1 else paper.INK
        face = colour if len(names) == 1 else "white"  # a point of several lines belongs to none of them
        axes.plot(*point, "o", color=colour, markerfacecolor=face, markersize=4.5, clip_on=False, zorder=4)


def _name_lines(sheet: paper.Sheet, axes: Any, points: Points, top: float, height: float) -> None:
    """Write each name next to the end of its line, and join the two."""
    right = paper.WIDTH - paper.MARGIN - max(map(sheet.width_of_words, points))
    ends = {}
    for name, line in points.items():
        x, y = axes.transAxes.inverted().transform(axes.transData.transform(line[-1]))
        ends[name] = LEFT + x * (right - LEADER - LEFT), top + (1 - y) * height
    places = paper.spread([y for _, y in ends.values()], [APART] * len(ends), top - APART, top + height + APART)
    for (name, (x, y)), place in zip(ends.items(), places):
        colour = _colour(points, name)
        sheet.ink.plot([x, right - 10, right - 3], [y, place, place], color=colour, linewidth=0.9)
        sheet.text(right, place, name)


def _colour(points: Points, name: str) -> str:
    place = list(points).index(name)
    return paper.darker(COLOURS[place % len(COLOURS)], place // len(COLOURS))
