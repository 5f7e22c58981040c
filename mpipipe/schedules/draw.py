"""A schedule to look at: its timeline as text."""

from __future__ import annotations

from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, simulate

IDLE = "."
BUSY = "-"
COLUMNS = 120  # width of a timeline, without the names of the ranks


def timeline(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """Draw one line per rank, with time to the right and dots where the rank idles.

    Actions are written out, ``2B0----``, where even the shortest one has room for that within 120
    columns; otherwise each column shows the op of the action that runs at its middle. A schedule
    that cannot run raises ScheduleError.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.timeline(schedules.one_f_one_b(2, 2)))
    rank 0 0F0 0F1 ........0B0---- ....0B1----
    rank 1 ....1F0 1B0---- 1F1 1B1---- ........
    """
    result = simulate(schedule, costs)
    labels = max(len(schedule.cell(action)) for order in schedule.orders for action in order)
    shortest = min(
        (end - start for spans in result.spans for _, start, end in spans if end > start),
        default=1.0,
    )
    # Columns for the shortest action.
    room = int(COLUMNS * shortest / max(result.makespan, shortest))
    written = room > labels
    room = labels + 1 if written else room
    # Whole columns per action where each can have one; else all of the time squeezed into the
    # columns.
    scale = room / shortest if room else COLUMNS / result.makespan
    columns = round(result.makespan * scale)
    names = [f"rank {rank} " for rank in range(schedule.ranks)]
    width = max(map(len, names))
    lines = []
    for name, spans in zip(names, result.spans):
        line = [IDLE] * columns
        for action, start, end in spans:
            first = round(start * scale)
            stop = round(end * scale)
            room = stop - first
            label = (
                f"{schedule.cell(action).ljust(room - 1, BUSY)} " if written else action.op * room
            )
            line[first:stop] = label[:room]
        lines.append(name.ljust(width) + "".join(line).rstrip())
    return "\n".join(lines)
