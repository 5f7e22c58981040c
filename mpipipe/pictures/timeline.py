"""A schedule over time, a row for each rank: its actions, with measured ones below, or the activations it holds."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.pictures import sheet as paper
from mpipipe.schedules import Schedule, Timeline, activations
from mpipipe.text import counted

ROW, BOX = 22.0, 0.84  # points from one rank to the next, and the part of them that is a box
TOP, NAME = 24.0, 16.0  # points above the key, and above a panel that has a name
FRAMED = 6.0  # points of a row below which frames would hide what they frame
DIGIT = 0.64  # width of a digit, in sizes of its font
TIGHT = 1.0  # points around the number in a narrow box
SIZES = (9.0, 8.0, 7.0, 6.0)  # of the numbers in boxes


class Measured(NamedTuple):
    """Something that a rank did, as a box of a timeline.

    Parameters
    ----------
    op : str
        ``F``, ``B``, ``I``, ``W`` or ``R``; any other text is shown in the key as it is.
    stage, microbatch : int or None
        Logical stage and micro-batch, with slices the number of the unit; None for what belongs to none.
    start, end : float
        Times in the unit of the costs, on one clock for all ranks.
    """

    op: str
    stage: int | None
    microbatch: int | str | None
    start: float
    end: float


Boxes = Sequence[Sequence[Measured]]  # for each rank


def draw_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    measured: Sequence[Iterable[Measured]] | None = None,
    *,
    unit: str = "the unit of the costs",
) -> None:
    """Draw a row of boxes for each rank, with the numbers of micro-batches where they have room.

    A colour is an op, and its shade the chunk: the first stage of a rank has the darkest. White is the bubble. The
    colours are those of Okabe and Ito (2008), https://jfly.uni-koeln.de/color/.

    Parameters
    ----------
    timeline : Timeline
        What `schedules.simulate` returns.
    path : str or path
        A file that ends in .png or .svg. One that is there is replaced.
    measured : sequence of iterables of Measured, optional
        For each rank what it did in a step. It is drawn below, on the same axis, from its earliest start on.
    unit : str, optional
        What stands at the axis of time, such as "ms".

    Raises
    ------
    ArgumentError, BackendError, StorageError
        The data or the name of the file do not fit, matplotlib (extra ``[plot]``) is not installed, or the file cannot
        be written.

    Examples
    --------
    >>> import os, tempfile
    >>> from mpipipe import pictures, schedules
    >>> timeline = schedules.simulate(schedules.one_f_one_b(ranks=2, microbatches=3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pictures.draw_timeline(timeline, f"{folder}/1f1b.svg")
    ...     os.listdir(folder)
    ['1f1b.svg']
    """
    schedule = timeline.schedule
    panels: list[Boxes] = [[[Measured(a.op, a.stage, a.microbatch, s, e) for a, s, e in row] for row in timeline.spans]]
    if measured is not None:
        panel = _checked(measured, schedule)
        first = min(box.start for row in panel for box in row)
        panels.append([[box._replace(start=box.start - first, end=box.end - first) for box in row] for row in panel])
    paper.check_boxes(sum(len(row) for panel in panels for row in panel))
    if schedule.slices > 1:
        panels = [[[_with_slice(box, schedule.slices) for box in row] for row in panel] for panel in panels]
    paper.draw(path, lambda: _sheet(timeline, panels, unit))


def _with_slice(box: Measured, slices: int) -> Measured:
    if not isinstance(box.microbatch, int):
        return box
    return box._replace(microbatch=f"{box.microbatch // slices}.{box.microbatch % slices}")


def _sheet(timeline: Timeline, panels: Sequence[Boxes], unit: str) -> paper.Sheet:
    schedule = timeline.schedule
    row = paper.height_of_row(schedule.ranks * len(panels), ROW)
    name = NAME if len(panels) > 1 else 0.0
    looks = paper.looks_of_ops(box.op for panel in panels for boxes in panel for box in boxes)
    notes = ["white: bubble"]
    if schedule.chunks > 1:
        notes.append("lighter: later chunk")
    sheet = paper.Sheet()
    sheet.title(paper.subject(schedule), f"makespan {timeline.makespan:.4g}, bubble {timeline.bubble_fraction:.1%}")
    top = sheet.key(TOP, list(looks.values()), schedule.chunks, notes) + 4
    ends = [max((box.end for boxes in panel for box in boxes), default=0.0) for panel in panels]
    longest = max(timeline.makespan, *ends)
    for place, (panel, end) in enumerate(zip(panels, ends)):
        if name:
            more = f", {end / timeline.makespan - 1:+.1%}" if timeline.makespan else ""
            words = f"measured: {end:.4g}{more}" if place else f"predicted: {end:.4g}"
            sheet.text(paper.MARGIN, top + name / 2, words, fontweight="bold")
        axes = paper.add_rows(sheet, top + name, schedule.ranks, row, longest)
        _fill(axes, panel, schedule, looks, row, end)
        top += name + schedule.ranks * row + 6
        if place < len(panels) - 1:
            axes.tick_params(axis="x", labelbottom=False)  # the panel below has the numbers
    axes.set_xlabel(f"time, in {unit}", fontsize=paper.TEXT, labelpad=2)
    sheet.end_at(top - 6 + paper.AXIS)
    return sheet


def _fill(axes: Any, panel: Boxes, schedule: Schedule, looks: dict[str, paper.Look], row: float, end: float) -> None:
    """Draw the boxes of all ranks."""
    points = (paper.WIDTH - paper.LEFT - paper.RIGHT) / axes.get_xlim()[1]  # of one unit of time
    boxes = [box for rank in panel for box in rank if box.end > box.start]
    size = _size(boxes, points, row)
    frame, high = (0.6, BOX) if row >= FRAMED else (0.0, 1.0)
    for rank, found in enumerate(panel):
        place = rank + (1 - high) / 2, high
        axes.broken_barh([(0, end)], place, facecolor=paper.WHITE, edgecolor=paper.PALE, linewidth=frame, clip_on=False)
        chunks: dict[int | None, int] = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
        groups: dict[tuple[str, int], list[Measured]] = defaultdict(list)
        for box in found:
            if box.end > box.start:
                groups[box.op, chunks.get(box.stage, 0)].append(box)
        for (op, chunk), same in groups.items():
            fill = paper.shade(looks[op].colour, chunk, schedule.chunks)
            axes.broken_barh(
                [(box.start, box.end - box.start) for box in same],
                place,
                facecolor=fill,
                edgecolor=paper.INK,
                linewidth=[_border(min(points * (box.end - box.start), row)) for box in same],
                hatch=looks[op].hatch,
                clip_on=False,  # else the last edge would be half as wide
                label=f"rank {rank} {op} chunk {chunk}",
            )
            for box in same:
                if box.microbatch is None:
                    continue
                own = size if _needed(box, size) <= points * (box.end - box.start) else SIZES[-1]
                if own <= size < math.inf and _needed(box, own, TIGHT) <= points * (box.end - box.start):
                    middle = (box.start + box.end) / 2, rank + 0.53
                    ink = paper.ink_on(fill)
                    axes.text(*middle, str(box.microbatch), color=ink, fontsize=own, ha="center", va="center")


def _border(least: float) -> float:
    """Return the width of the border of a box whose shorter side has `least` points."""
    return 0.6 if least > 5 else 0.25 if least > 2 else 0.0


def _size(boxes: Iterable[Measured], points: float, row: float) -> float:
    """Return the largest size at which every number has room in its box; boxes too narrow for any do not count."""
    sizes = [size for size in SIZES if size <= 0.75 * BOX * row]
    if not sizes:
        return math.inf  # no number has room in so low a row
    widths = [(box, points * (box.end - box.start)) for box in boxes if box.microbatch is not None]
    roomy = [(box, width) for box, width in widths if _needed(box, sizes[-1]) <= width]
    return next(size for size in sizes if size == sizes[-1] or all(_needed(box, size) <= width for box, width in roomy))


def _needed(box: Measured, size: float, around: float = 3.0) -> float:
    return DIGIT * size * len(str(box.microbatch)) + around


def _checked(measured: Sequence[Iterable[Measured]], schedule: Schedule) -> Boxes:
    """Return what was measured; raises ArgumentError if it does not belong to the schedule."""
    if len(measured) != schedule.ranks:
        raise ArgumentError(
            "what was measured is of another number of ranks",
            found=counted(len(measured), "rank"),
            expected=f"{schedule.ranks}, as in the schedule",
            remedy="pass one list for each rank; an empty one for a rank that did nothing",
        )
    panel = []
    for rank, boxes in enumerate(measured):
        row = list(boxes)
        for box in row:
            if len(box) != 5 or not paper.is_number(box[3]) or not paper.is_number(box[4]) or not box[3] <= box[4]:
                raise ArgumentError(
                    "what was measured is no box of a timeline",
                    rank=rank,
                    found=repr(box),
                    expected="pictures.Measured(op, stage, microbatch, start, end), finite times, start <= end",
                )
        panel.append([Measured(*box) for box in row])
    if not any(panel):
        raise ArgumentError(
            "nothing was measured", found="no box on any rank", expected="what the ranks did", remedy="leave it out"
        )
    return panel


# -- The activations that each rank holds over time -------------------------------------------------------------------


MEMORY_ROW, PEAKS = 34.0, 54.0  # points: from one rank to the next; for the peaks at the right
FULL = 0.86  # of a row's height, for the largest peak of all ranks


def draw_memory(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw for each rank how many activations it holds at which time, with the peak at the end of its row.

    An activation is that of one chunk and one micro-batch, counted as in `Timeline.peak_activations`. All rows have one
    scale. Files and errors are as for `draw_timeline`.
    """
    paper.check_boxes(sum(map(len, timeline.spans)))
    paper.draw(path, lambda: _memory_sheet(timeline))


def profile(timeline: Timeline, rank: int) -> tuple[Sequence[float], Sequence[int]]:
    """Return the times at which the number of activations of a rank changes, and the number from then on.

    The first time is 0 and the last one is the makespan.
    """
    times, counts, spans = [0.0], [0], timeline.spans[rank]
    for (begins, ends), (_, start, end) in zip(activations(timeline.schedule, [span[0] for span in spans]), spans):
        if begins or ends:
            times.append(start if begins else end)
            counts.append(counts[-1] + begins - ends)
            if times[-2] == times[-1]:  # one goes and one comes: no change that could be seen
                del times[-2], counts[-2]
    return [*times, timeline.makespan], [*counts, counts[-1]]


def _memory_sheet(timeline: Timeline) -> paper.Sheet:
    schedule, peaks = timeline.schedule, timeline.peak_activations
    row = paper.height_of_row(schedule.ranks, MEMORY_ROW)
    sheet = paper.Sheet()
    sheet.title(paper.subject(schedule), f"largest peak {max(peaks)}, smallest {min(peaks)}")
    part = "" if schedule.chunks == 1 else f", each of one chunk of {schedule.chunks}"
    words = f"activations that each rank holds{part}; dotted: the largest peak of all ranks"
    sheet.text(paper.MARGIN, TOP + paper.LINE / 2, words)
    top = TOP + paper.LINE + 4
    axes = paper.add_rows(sheet, top, schedule.ranks, row, timeline.makespan, right=PEAKS)
    scale = FULL / max(1, *peaks)
    for rank, peak in enumerate(peaks):
        times, counts = profile(timeline, rank)
        heights = [rank + 1 - scale * count for count in counts]
        axes.fill_between(times, heights, rank + 1, step="post", color=paper.SKY_BLUE, linewidth=0)
        axes.plot(
            times, heights, drawstyle="steps-post", color=paper.BLUE, linewidth=min(1.0, row / 10), label=f"rank {rank}"
        )
        axes.axhline(rank + 1 - FULL, color=paper.PALE, linewidth=min(0.8, row / 20), linestyle=":", zorder=0)
        if row >= 10 or rank % int(-(-10 // row)) == 0:
            sheet.text(paper.WIDTH - PEAKS + 6, top + (rank + 0.55) * row, f"peak {peak}")
    axes.set_xlabel("time, in the unit of the costs", fontsize=paper.TEXT, labelpad=2)
    sheet.end_at(top + schedule.ranks * row + paper.AXIS)
    return sheet
