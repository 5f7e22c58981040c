"""A trace as an archive in the Open Trace Format 2, which Vampir, Scalasca and otf2-print read.

Each rank is a location. Its steps are regions, and so are the pieces within them: "forward of stage 2", "late",
"optimizer". A message is sent at the moment it was handed over, and received when it was there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mpipipe.analysis.records import RankRecord, StepRecord, deliveries
from mpipipe.analysis.segments import Segment
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Timeline
from mpipipe.text import optional_library

RESOLUTION = 1_000_000_000  # ticks in a second
NAME = "traces"
OPS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}
Event: TypeAlias = "tuple[float, int, str, tuple]"  # time, order of those at one time, kind, what it is about


def library() -> Any:
    """Return the package otf2; raises BackendError if it is missing."""
    return optional_library("otf2", "write a trace", "trace")


def name_of(folder: str | Path) -> str:
    """Return the name of a folder as the library takes it; raises ArgumentError for one whose bytes are not UTF-8."""
    try:
        return os.fsencode(folder).decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(
            "the library otf2 takes no such name of a folder",
            found=str(folder),
            expected="a name in UTF-8",
            remedy="choose another folder for the trace",
        ) from error


def write(folder: Path, records: Sequence[RankRecord], pieces: Sequence[Sequence[Sequence[Segment]]]) -> None:
    """Write the archive into a new folder; the records of all ranks are on one clock, `pieces` those of `segments`."""
    otf2 = library()
    zero = min((step.start for record in records for step in record.steps), default=0.0)
    with otf2.writer.open(name_of(folder), NAME, timer_resolution=RESOLUTION) as trace:
        definitions = trace.definitions
        node = definitions.system_tree_node("job")
        locations = [
            definitions.location(
                f"rank {record.rank}",
                type=otf2.LocationType.CPU_THREAD,
                group=definitions.location_group(
                    f"rank {record.rank}", location_group_type=otf2.LocationGroupType.PROCESS, system_tree_parent=node
                ),
            )
            for record in records
        ]
        mpi, every = otf2.Paradigm.MPI, tuple(range(len(locations)))
        definitions.group("all", group_type=otf2.GroupType.COMM_LOCATIONS, paradigm=mpi, members=tuple(locations))
        group = definitions.group("job", group_type=otf2.GroupType.COMM_GROUP, paradigm=mpi, members=every)
        comm = definitions.comm("job", group=group)  # ranks in events are those of this communicator
        regions: dict[str, Any] = {}
        for location, found in zip(locations, _events(records, pieces)):
            writer = trace.event_writer_from_location(location)
            for time, _, kind, about in found:
                ticks = max(0, round((time - zero) * RESOLUTION))
                if kind in ("enter", "leave"):
                    (name,) = about
                    if name not in regions:
                        regions[name] = definitions.region(name, region_role=otf2.RegionRole.FUNCTION)
                    getattr(writer, kind)(ticks, regions[name])
                else:
                    peer, tag, nbytes = about
                    (writer.mpi_send if kind == "send" else writer.mpi_recv)(ticks, peer, comm, tag, nbytes)


def _events(records: Sequence[RankRecord], pieces: Sequence[Sequence[Sequence[Segment]]]) -> list[list[Event]]:
    """The events of each rank in the order of time; those at one time so that regions stay nested."""
    found = [
        [list(_of_regions(step, parts)) for step, parts in zip(record.steps, steps)]
        for record, steps in zip(records, pieces)
    ]
    delivered = deliveries(records)
    microbatches = max((each.message[1] + 1 for each in delivered), default=1)
    for each in delivered:
        edge, microbatch, direction = each.message
        tag = (edge * microbatches + microbatch) * 2 + direction
        found[each.source][each.step].append((each.sent, 2, "send", (each.target, tag, each.nbytes)))
        found[each.target][each.step].append((each.received, 2, "receive", (each.source, tag, each.nbytes)))
    return [[event for step in rank for event in sorted(step, key=lambda event: event[:2])] for rank in found]


def _of_regions(step: StepRecord, pieces: Sequence[Segment]) -> Iterable[Event]:
    yield step.start, 0, "enter", ("step",)
    for piece in pieces:
        if piece.part != "overhead":
            action = piece.action
            name = piece.part if action is None else f"{OPS.get(action.op, action.op)} of stage {action.stage}"
            yield piece.start, 3, "enter", (name,)
            yield piece.end, 1, "leave", (name,)
    yield step.end, 4, "leave", ("step",)


# -- A trace as events for Perfetto (https://ui.perfetto.dev) and chrome://tracing: measured and predicted, side by side
#
# Each rank is a process with two rows: what was measured, and what `schedules.simulate` makes of the measured costs,
# each step beginning where the measured one does. Arrows lead from the sending of a message to its arrival.


MEASURED, PREDICTED = 0, 1  # rows
MICRO = 1e6  # Chrome counts in microseconds


def events(
    records: Sequence[RankRecord], pieces: Sequence[Sequence[Sequence[Segment]]], predicted: Timeline
) -> list[dict[str, Any]]:
    """Return the events, whose json.dumps the viewers read: of all ranks, and of a step as it is `predicted`."""
    zero = min((step.start for record in records for step in record.steps), default=0.0)
    found = list(_names(records))
    for record, steps in zip(records, pieces):
        for number, (step, parts) in enumerate(zip(record.steps, steps)):
            for piece in parts:
                place = (record.rank, MEASURED, zero)
                name = piece.name if piece.action is None else predicted.schedule.cell(piece.action)
                found.append(_span(name, piece.part, (piece.start, piece.end), place, step=number))
            first = min((start for _, start, _ in step.actions), default=step.start)
            origin = first - predicted.starts[record.position][0]
            for action, start, end in predicted.spans[record.position]:
                place = (record.rank, PREDICTED, zero)
                name = predicted.schedule.cell(action)
                found.append(_span(name, action.op, (origin + start, origin + end), place, step=number))
    return found + list(_arrows(records, zero))


def _names(records: Sequence[RankRecord]) -> Iterable[dict[str, Any]]:
    for record in records:
        name = f"rank {record.rank}"
        yield {"ph": "M", "name": "process_name", "pid": record.rank, "tid": 0, "args": {"name": name}}
        for row, title in ((MEASURED, "measured"), (PREDICTED, "predicted")):
            yield {"ph": "M", "name": "thread_name", "pid": record.rank, "tid": row, "args": {"name": title}}


def _span(
    name: str, kind: str, times: tuple[float, float], place: tuple[int, int, float], **facts: Any
) -> dict[str, Any]:
    start, end = times
    rank, row, zero = place
    event = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": row, "args": facts}
    return {**event, "ts": (start - zero) * MICRO, "dur": (end - start) * MICRO}


def _arrows(records: Sequence[RankRecord], zero: float) -> Iterable[dict[str, Any]]:
    for number, each in enumerate(deliveries(records)):
        arrow = {"name": "message", "cat": "message", "id": number, "tid": MEASURED}
        start, end = records[each.source].rank, records[each.target].rank
        facts = {"bytes": each.nbytes}
        yield {**arrow, "ph": "s", "pid": start, "ts": (each.sent - zero) * MICRO, "args": facts}
        yield {**arrow, "ph": "f", "bp": "e", "pid": end, "ts": (each.received - zero) * MICRO}
