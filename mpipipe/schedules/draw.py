"""A schedule to look at: its timeline as text."""

from __future__ import annotations

from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, Timeline, simulate

IDLE = "."
BUSY = "-"
COLUMNS = 120  # width of a timeline, without the names of the ranks


# The colours of Okabe and Ito, as in the pictures of `tracing`.
COLOURS = {"F": "#56b4e9", "B": "#009e73", "I": "#cc79a7", "W": "#e69f00", "R": "#8c8c8c"}
PICTURE = 720.0  # width of a picture in a notebook, in pixels
ROW = 24
MOST_BOXES = 5000


def picture(result: Timeline) -> str | None:
    """Draw a timeline as SVG, for a notebook; None where there are too many actions for one."""
    if sum(map(len, result.spans)) > MOST_BOXES:
        return None
    scale = PICTURE / (result.makespan or 1.0)
    height = ROW * len(result.spans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PICTURE}" height="{height}" '
        'font-family="sans-serif" font-size="10" text-anchor="middle" stroke-width="0.5">'
    ]
    for rank, spans in enumerate(result.spans):
        for action, start, end in spans:
            left = scale * start
            width = scale * (end - start)
            parts.append(
                f'<rect x="{left:.2f}" y="{ROW * rank + 2}" width="{width:.2f}" '
                f'height="{ROW - 4}" fill="{COLOURS[action.op]}" stroke="black"/>'
            )
            label = str(action.microbatch)
            if width > 7 * len(label):
                parts.append(
                    f'<text x="{left + width / 2:.2f}" y="{ROW * rank + 16}">{label}</text>'
                )
    return "\n".join([*parts, "</svg>"])


def timeline(schedule: Schedule, costs: Costs = EQUAL_COSTS, columns: int = COLUMNS) -> str:
    """Draw one line per rank, with time to the right and dots where the rank idles.

    Actions are written out, ``2B0----``, where even the shortest one has room for that; otherwise
    each column shows the op of the action that runs at its middle. A schedule that cannot run
    raises ScheduleError.

    Parameters
    ----------
    schedule, costs : Schedule, Costs
        As for `simulate`.
    columns : int, optional
        Width of a line, without the names of the ranks.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.timeline(schedules.one_f_one_b(2, 2)))
    rank 0 0F0 0F1 ........0B0---- ....0B1----
    rank 1 ....1F0 1B0---- 1F1 1B1---- ........
    """
    result = simulate(schedule, costs)
    labels = 0
    times = []
    for spans in result.spans:
        for action, start, end in spans:
            labels = max(labels, len(schedule.cell(action)))
            if end > start:
                times.append(end - start)
    shortest = min(times, default=1.0)
    # Columns for the shortest action.
    room = int(columns * shortest / max(result.makespan, shortest))
    written = room > labels
    if written:
        room = labels + 1
    # Whole columns per action where each can have one; else all of the time squeezed into the
    # columns.
    if room:
        scale = room / shortest
    else:
        scale = columns / result.makespan
    length = round(result.makespan * scale)
    width = len(f"rank {schedule.ranks - 1} ")
    lines = []
    for rank, spans in enumerate(result.spans):
        line = [IDLE] * length
        for action, start, end in spans:
            first = round(start * scale)
            stop = round(end * scale)
            room = stop - first
            label = action.op * room
            if written:
                label = f"{schedule.cell(action).ljust(room - 1, BUSY)} "
            line[first:stop] = label[:room]
        lines.append(f"rank {rank} ".ljust(width) + "".join(line).rstrip())
    return "\n".join(lines)
