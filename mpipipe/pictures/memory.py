"""The activations that each rank holds over time."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpipipe.pictures.sheet import (
    AXIS,
    BLUE,
    LINE,
    MARGIN,
    PALE,
    SKY_BLUE,
    WIDTH,
    Sheet,
    add_rows,
    check_boxes,
    draw,
    height_of_row,
    name_time,
    subject,
)
from mpipipe.schedules import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Timeline

ROW, TOP, RIGHT = 34.0, 24.0, 54.0  # points: from one rank to the next; above the note; for the peaks
FULL = 0.86  # of a row's height, for the largest peak of all ranks


def draw_memory(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw for each rank how many activations it holds at which time, with the peak at the end of its row.

    An activation is that of one chunk and one micro-batch, and is counted as in `Timeline.peak_activations`: from its
    forward until its backward, or until its weight gradient where the backward is split; one that is recomputed (``R``)
    from then on. All rows have one scale.

    Parameters
    ----------
    timeline : Timeline
        What `schedules.simulate` returns.
    path : str or path
        As for `draw_timeline`, and the same errors.
    """
    check_boxes(sum(map(len, timeline.spans)))
    draw(path, lambda: _sheet(timeline))


def profile(timeline: Timeline, rank: int) -> tuple[Sequence[float], Sequence[int]]:
    """Return the times at which the number of activations of a rank changes, and the number from then on.

    The first time is 0 and the last one is the makespan.
    """
    times, counts = [0.0], [0]
    schedule = timeline.schedule
    keeps = timeline.peak_activations[rank] > 0  # a schedule of forwards only keeps none
    again = {(action.stage, action.microbatch) for action, _, _ in timeline.spans[rank] if action.op == RECOMPUTE}
    for action, start, end in timeline.spans[rank]:
        if action.op == FORWARD and keeps and schedule.has_backward(action.stage):
            time, change = start, int((action.stage, action.microbatch) not in again)
        elif action.op == RECOMPUTE:
            time, change = start, 1
        elif action.op in (BACKWARD, WEIGHT_GRAD):
            time, change = end, -1
        else:
            continue
        counts.append(counts[-1] + change)
        times.append(time)
        if times[-2] == time:  # one goes and one comes: no change that could be seen
            del times[-2], counts[-2]
    return [*times, timeline.makespan], [*counts, counts[-1]]


def _sheet(timeline: Timeline) -> Sheet:
    schedule, peaks = timeline.schedule, timeline.peak_activations
    row = height_of_row(schedule.ranks, ROW)
    sheet = Sheet()
    sheet.title(subject(schedule), f"largest peak {max(peaks)}, smallest {min(peaks)}")
    part = "" if schedule.chunks == 1 else f", each of one chunk of {schedule.chunks}"
    sheet.text(MARGIN, TOP + LINE / 2, f"activations that each rank holds{part}; dotted: the largest peak of all ranks")
    top = TOP + LINE + 4
    axes = add_rows(sheet, top, schedule.ranks, row, timeline.makespan, right=RIGHT)
    scale = FULL / max(1, *peaks)
    for rank, peak in enumerate(peaks):
        times, counts = profile(timeline, rank)
        heights = [rank + 1 - scale * count for count in counts]
        axes.fill_between(times, heights, rank + 1, step="post", color=SKY_BLUE, linewidth=0)
        axes.plot(
            times, heights, drawstyle="steps-post", color=BLUE, linewidth=min(1.0, row / 10), label=f"rank {rank}"
        )
        axes.axhline(rank + 1 - FULL, color=PALE, linewidth=min(0.8, row / 20), linestyle=":", zorder=0)
        if row >= 10 or rank % int(-(-10 // row)) == 0:
            sheet.text(WIDTH - RIGHT + 6, top + (rank + 0.55) * row, f"peak {peak}")
    name_time(axes)
    sheet.end_at(top + schedule.ranks * row + AXIS)
    return sheet
