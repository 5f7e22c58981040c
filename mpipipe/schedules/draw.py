"""Schedules to look at: a table of the orders, a timeline as text, and one for Chrome's trace viewer."""

from __future__ import annotations

from mpipipe.schedules.grid import grid
from mpipipe.schedules.simulate import Costs, Timeline, simulate

__all__ = ["chrome_trace", "grid", "timeline"]

IDLE, BUSY = ".", "-"
EQUAL = Costs()  # a unit of time for each part of the work
COLUMNS = 120  # of a timeline, besides the names of the ranks


def timeline(schedule, costs: Costs = EQUAL) -> str:
    """One line per rank, time to the right, dots where the rank idles.

    Actions are written out, ``2B0----``, where even the shortest one has room for that within 120 columns; otherwise
    each column shows the op of the action that runs at its middle.

    Parameters
    ----------
    schedule : Schedule; it is checked first
    costs : Costs

    Returns
    -------
    str : lines without a final newline
    """
    result = simulate(schedule, costs)
    labels = max(len(str(action)) for order in schedule.orders for action in order)
    shortest = min((end - start for spans in result.spans for _, start, end in spans if end > start), default=1.0)
    room = int(COLUMNS * shortest / max(result.makespan, shortest))  # columns for the shortest action
    draw, room = (_written_out, labels + 1) if room > labels else (_letters, room)
    # Whole columns per action where each can have one; else all of the time squeezed into the columns.
    scale = room / shortest if room else COLUMNS / result.makespan
    columns = round(result.makespan * scale)
    names = [f"rank {rank} " for rank in range(schedule.ranks)]
    width = max(map(len, names))
    return "\n".join(name.ljust(width) + draw(spans, columns, scale) for name, spans in zip(names, result.spans))


def chrome_trace(timeline: Timeline) -> list[dict]:
    """The spans of a timeline as trace events: chrome://tracing and Perfetto show ``json.dumps`` of the list.

    Parameters
    ----------
    timeline : Timeline; its times are read as seconds

    Returns
    -------
    list of dict : a name for each rank, which is a process there, and one complete event per action, in microseconds
    """
    events = []
    for rank, spans in enumerate(timeline.spans):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for action, start, end in spans:
            place = {"stage": action.stage, "microbatch": action.microbatch}
            event = {"ph": "X", "name": str(action), "cat": action.op, "pid": rank, "tid": 0, "args": place}
            events.append({**event, "ts": start * 1e6, "dur": (end - start) * 1e6})
    return events


def _written_out(spans, columns, scale):
    line = [IDLE] * columns
    for action, start, end in spans:
        first, stop = round(start * scale), round(end * scale)
        room = stop - first
        line[first:stop] = (f"{action}".ljust(room - 1, BUSY) + " ")[:room]
    return "".join(line).rstrip()


def _letters(spans, columns, scale):
    line = [IDLE] * columns
    for action, start, end in spans:
        for column in range(round(start * scale), round(end * scale)):
            line[column] = action.op
    return "".join(line)
