"""A trace as events for Perfetto (https://ui.perfetto.dev): measured and predicted.

Each rank is a process with two rows: what was measured, and what `schedules.simulate` makes of the
measured costs, each step beginning where the measured one does. Arrows lead from the sending of a
message to its arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpipipe.options import Values
from mpipipe.schedules import Timeline
from mpipipe.tracing.records import RankRecord, deliveries
from mpipipe.tracing.segments import Segment

# rows
MEASURED = 0
PREDICTED = 1
MICRO = 1e6  # Chrome counts in microseconds


def events(
    records: Sequence[RankRecord],
    pieces: Sequence[Sequence[Sequence[Segment]]],
    predicted: Timeline,
) -> list[Values]:
    """Return the events of all ranks, and of a step as it is `predicted`, for json.dumps."""
    zero = min((step.start for record in records for step in record.steps), default=0.0)
    found = list(_names(records))
    for record, steps in zip(records, pieces):
        for number, (step, parts) in enumerate(zip(record.steps, steps)):
            spans = []
            for piece in parts:
                name = piece.name
                if piece.action is not None:
                    name = predicted.schedule.cell(piece.action)
                spans.append((MEASURED, name, piece.part, piece.start, piece.end))
            first = min((start for _, start, _ in step.actions), default=step.start)
            origin = first - predicted.starts[record.position][0]
            for action, start, end in predicted.spans[record.position]:
                name = predicted.schedule.cell(action)
                spans.append((PREDICTED, name, action.op, origin + start, origin + end))
            for row, name, kind, start, end in spans:
                event = {"ph": "X", "name": name, "cat": kind, "pid": record.rank, "tid": row}
                times = {"ts": (start - zero) * MICRO, "dur": (end - start) * MICRO}
                found.append({**event, "args": {"step": number}, **times})
    return found + list(_arrows(records, zero))


def _names(records: Sequence[RankRecord]) -> Iterable[Values]:
    for record in records:
        titles = (
            ("process_name", 0, f"rank {record.rank}"),
            ("thread_name", MEASURED, "measured"),
            ("thread_name", PREDICTED, "predicted"),
        )
        for kind, row, title in titles:
            args = {"name": title}
            yield {"ph": "M", "name": kind, "pid": record.rank, "tid": row, "args": args}


def _arrows(records: Sequence[RankRecord], zero: float) -> Iterable[Values]:
    for number, each in enumerate(deliveries(records)):
        arrow = {"name": "message", "cat": "message", "id": number, "tid": MEASURED}
        start = records[each.source].rank
        end = records[each.target].rank
        facts = {"bytes": each.nbytes}
        yield {**arrow, "ph": "s", "pid": start, "ts": (each.sent - zero) * MICRO, "args": facts}
        yield {**arrow, "ph": "f", "bp": "e", "pid": end, "ts": (each.received - zero) * MICRO}
