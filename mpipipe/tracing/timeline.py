"""A schedule over time, a row for each rank: its actions, or the activations that it holds."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mpipipe.schedules import Action, Schedule, Timeline, activations
from mpipipe.tracing import sheet as paper

# points from one rank to the next, and the part of them that is a box
ROW = 22.0
BOX = 0.84
TOP = 24.0  # points above the key
FRAMED = 6.0  # points of a row below which frames would hide what they frame
DIGIT = 0.64  # width of a digit, in sizes of its font
SIZE = 7.0  # size of the numbers in boxes
AROUND = 2.0  # points around a number


def draw_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw a row of boxes for each rank, with the numbers of micro-batches where they have room.

    A colour is an op, and its shade the chunk: the first stage of a rank has the darkest. White is
    the bubble. The colours are those of Okabe and Ito (2008), https://jfly.uni-koeln.de/color/.

    Parameters
    ----------
    timeline : Timeline
        What `schedules.simulate` returns.
    path : str or path
        A file that ends in .png or .svg. One that is there is replaced.

    Raises
    ------
    ArgumentError, BackendError, StorageError
        There are too many actions, the name of the file does not fit, matplotlib (extra ``[plot]``)
        is not installed, or the file cannot be written.

    Examples
    --------
    >>> import os, tempfile
    >>> from mpipipe import schedules, tracing
    >>> timeline = schedules.simulate(schedules.one_f_one_b(ranks=2, microbatches=3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracing.draw_timeline(timeline, f"{folder}/1f1b.svg")
    ...     os.listdir(folder)
    ['1f1b.svg']
    """
    paper.draw(path, timeline, _sheet)


def _sheet(timeline: Timeline) -> paper.Sheet:
    schedule = timeline.schedule
    ops = {action.op for order in schedule.orders for action in order}
    notes = ["white: bubble"]
    if schedule.chunks > 1:
        notes.append("lighter: later chunk")
    sheet = paper.Sheet()
    sheet.title(
        schedule, f"makespan {timeline.makespan:.4g}, bubble {timeline.bubble_fraction:.1%}"
    )
    looks = []
    for op, look in paper.OPS.items():
        if op in ops:
            looks.append(look)
    top = sheet.key(TOP, looks, notes) + 4
    _fill(*paper.add_rows(sheet, top, timeline, ROW), timeline)
    return sheet


def _fill(axes: Any, row: float, timeline: Timeline) -> None:
    """Draw the boxes of all ranks."""
    schedule = timeline.schedule
    longest = axes.get_xlim()[1]
    points = (paper.WIDTH - paper.LEFT - paper.RIGHT) / longest  # length of one unit of time
    frame = 0.0
    high = 1.0
    if row >= FRAMED:
        frame = 0.6
        high = BOX
    for rank, spans in enumerate(timeline.spans):
        place = rank + (1 - high) / 2, high
        whole = [(0, timeline.makespan)]
        axes.broken_barh(
            whole,
            place,
            facecolor=paper.WHITE,
            edgecolor=paper.PALE,
            linewidth=frame,
            clip_on=False,
        )
        chunks = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
        groups: dict[tuple[str, int], list[tuple[str, float, float]]] = defaultdict(list)
        for action, start, end in spans:
            if end > start:
                box = _number(action, schedule), start, end - start
                groups[action.op, chunks[action.stage]].append(box)
        for (op, chunk), boxes in groups.items():
            fill = paper.shade(paper.OPS[op].colour, chunk, schedule.chunks)
            axes.broken_barh(
                [(start, length) for _, start, length in boxes],
                place,
                facecolor=fill,
                edgecolor=paper.INK,
                linewidth=[_border(min(points * length, row)) for _, _, length in boxes],
                clip_on=False,  # the last edge would be half as wide otherwise
                label=f"rank {rank} {op} chunk {chunk}",
            )
            for number, start, length in boxes:
                needed = DIGIT * SIZE * len(number) + AROUND
                if SIZE <= 0.75 * BOX * row and needed <= points * length:
                    middle = start + length / 2, rank + 0.53
                    axes.text(
                        *middle, number, color=paper.BLACK, fontsize=SIZE, ha="center", va="center"
                    )


def _number(action: Action, schedule: Schedule) -> str:
    """Return the text in the box of an action: its micro-batch, and its slice."""
    if schedule.slices == 1:
        return str(action.microbatch)
    return f"{action.microbatch // schedule.slices}.{action.microbatch % schedule.slices}"


def _border(least: float) -> float:
    """Return the width of the border of a box whose shorter side has `least` points."""
    if least > 5:
        return 0.6
    if least > 2:
        return 0.25
    return 0.0


# -- The activations that each rank holds over time ------------------------------------------------


# points: from one rank to the next; for the peaks at the right
MEMORY_ROW = 34.0
PEAKS = 54.0
FULL = 0.86  # share of a row's height for the largest peak of all ranks


def draw_memory(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw how many activations each rank holds over time, with the peak of each row.

    An activation is that of one chunk and one micro-batch, counted as in
    `Timeline.peak_activations`. All rows have one scale. Files and errors are as for
    `draw_timeline`.
    """
    paper.draw(path, timeline, _memory_sheet)


def profile(timeline: Timeline, rank: int) -> tuple[Sequence[float], Sequence[int]]:
    """Return the times at which the activations of a rank change, and their numbers.

    The first time is 0 and the last one is the makespan.
    """
    times = [0.0]
    counts = [0]
    spans = timeline.spans[rank]
    changes = activations(timeline.schedule, [action for action, _, _ in spans])
    for (begins, ends), (_, start, end) in zip(changes, spans):
        if begins or ends:
            times.append(start if begins else end)
            counts.append(counts[-1] + begins - ends)
            if times[-2] == times[-1]:  # one goes and one comes: no change that could be seen
                del times[-2], counts[-2]
    return [*times, timeline.makespan], [*counts, counts[-1]]


def _memory_sheet(timeline: Timeline) -> paper.Sheet:
    schedule = timeline.schedule
    peaks = timeline.peak_activations
    sheet = paper.Sheet()
    sheet.title(schedule, f"largest peak {max(peaks)}, smallest {min(peaks)}")
    if schedule.chunks == 1:
        part = ""
    else:
        part = f", each of one chunk of {schedule.chunks}"
    words = f"activations that each rank holds{part}; dotted: the largest peak of all ranks"
    sheet.text(paper.MARGIN, TOP + paper.LINE / 2, words)
    top = TOP + paper.LINE + 4
    axes, row = paper.add_rows(sheet, top, timeline, MEMORY_ROW, PEAKS)
    scale = FULL / max(1, *peaks)
    for rank, peak in enumerate(peaks):
        times, counts = profile(timeline, rank)
        heights = [rank + 1 - scale * count for count in counts]
        axes.fill_between(times, heights, rank + 1, step="post", color=paper.SKY_BLUE, linewidth=0)
        axes.plot(
            times,
            heights,
            drawstyle="steps-post",
            color=paper.BLUE,
            linewidth=min(1.0, row / 10),
            label=f"rank {rank}",
        )
        axes.axhline(
            rank + 1 - FULL, color=paper.PALE, linewidth=min(0.8, row / 20), linestyle=":", zorder=0
        )
        if row >= 10 or rank % int(-(-10 // row)) == 0:
            sheet.text(paper.WIDTH - PEAKS + 6, top + (rank + 0.55) * row, f"peak {peak}")
    return sheet
