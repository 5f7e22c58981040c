"""What all ranks did in the recorded steps, as plain data.

A message is named by (edge, micro-batch, direction). Edge e joins stages e - 1 and e; further edges
are skips. The direction is 0 for an activation and 1 for a gradient. Within a step of one pipeline
no name comes twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from mpipipe.schedules import Action
from mpipipe.trace import Sent, Span

ACTION = re.compile(r"([0-9]+)([A-Z])([0-9]+)(?:\.([0-9]+))?")
Message: TypeAlias = tuple[int, int, int]
SkipEdge: TypeAlias = tuple[int, int, int]  # number of the edge, and the stages that it joins


class Waited(NamedTuple):
    """A wait for other ranks.

    start, end : seconds
    """

    what: str  # reason of the wait
    start: float
    end: float
    message: Message | None = None  # the message that it was for, or None
    group: tuple[int, ...] | None = None  # key of the group whose ranks all had to come, or None
    sums: bool = False  # whether it is a sum over replicas


class StepRecord(NamedTuple):
    """One step of a rank: start, end, actions, waits, messages, and other spans."""

    start: float
    end: float
    actions: list[tuple[Action, float, float]]
    waits: list[Waited]
    sent: list[Sent]
    spans: list[Span]

    def moved(self, clock: Callable[[float], float]) -> StepRecord:
        """The same by another clock."""
        return StepRecord(
            clock(self.start),
            clock(self.end),
            [(action, clock(start), clock(end)) for action, start, end in self.actions],
            [wait._replace(start=clock(wait.start), end=clock(wait.end)) for wait in self.waits],
            [sent._replace(time=clock(sent.time)) for sent in self.sent],
            [span._replace(start=clock(span.start), end=clock(span.end)) for span in self.spans],
        )

    def received(self, skips: Sequence[SkipEdge] = ()) -> dict[Message, float]:
        """Return when each message was there, by its wait or the action that takes it."""
        times = {}
        for action, start, _ in self.actions:
            for message in taken_by(action, skips):
                times[message] = start
        for wait in self.waits:
            if wait.message in times:
                times[wait.message] = min(wait.end, times[wait.message])
        return times


class RankRecord(NamedTuple):
    """What one rank did.

    clock : two comparisons with the clock of rank 0: (when, by this rank's clock; seconds that rank
    0 is ahead)
    """

    rank: int  # its number among all that were recorded
    position: int  # its rank in its pipeline
    replica: int  # number of that pipeline
    clock: tuple[tuple[float, float], tuple[float, float]]
    steps: list[StepRecord]  # the recorded steps
    skips: Sequence[SkipEdge] = ()  # the skips of the schedule


def action_of(text: str, slices: int = 1) -> Action | None:
    """The action whose text form this is, in a schedule that cuts sequences into `slices`."""
    match = ACTION.fullmatch(text)
    if match is None:
        return None
    return Action(int(match[1]), match[2], int(match[3]) * slices + int(match[4] or 0))


def taken_by(action: Action, skips: Sequence[SkipEdge] = ()) -> list[Message]:
    """The messages that an action takes, as far as they come from other ranks."""
    stage, op, microbatch = action
    if op == "F":
        edges = [stage, *(edge for edge, _, target in skips if target == stage)]
        return [(edge, microbatch, 0) for edge in edges]
    if op not in "BI":
        return []
    edges = [stage + 1, *(edge for edge, source, _ in skips if source == stage)]
    return [(edge, microbatch, 1) for edge in edges]


# -- Messages of a record with both ends: who sent what when, and when it was there ----------------


class Delivery(NamedTuple):
    """A message that was sent and received.

    source, target : numbers of the two ranks among the records
    sent, received : seconds
    """

    step: int  # number of the step
    source: int
    target: int
    message: Message  # its name
    nbytes: int  # its size
    sent: float
    received: float


def deliveries(records: Sequence[RankRecord]) -> list[Delivery]:
    """Return all messages whose sending and arrival were recorded."""
    index = {}
    for number, record in enumerate(records):
        index[(record.replica, record.position)] = number
    arrivals = {}
    for target, record in enumerate(records):
        for number, step in enumerate(record.steps):
            arrivals[target, number] = step.received(record.skips)
    found = []
    for source, record in enumerate(records):
        for number, step in enumerate(record.steps):
            for message, peer, nbytes, time in step.sent:
                target = index.get((record.replica, peer), -1)
                arrival = arrivals.get((target, number), {}).get(message)
                if arrival is not None:
                    found.append(Delivery(number, source, target, message, nbytes, time, arrival))
    return found


# -- The records of all ranks on the clock of rank 0 -----------------------------------------------
#
# Each clock was compared with that of rank 0 before the first and after the last recorded step.
# Between the two its offset is taken to grow evenly, which is the drift. What is left are the
# errors of the comparisons: some microseconds, by which a message may seem to arrive before it was
# sent.


def on_one_clock(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the records with all times by the clock of rank 0."""
    moved = []
    for record in records:
        clock = _clock(record)
        moved.append(record._replace(steps=[step.moved(clock) for step in record.steps]))
    return moved


def _clock(record: RankRecord) -> Callable[[float], float]:
    (first, ahead), (last, ahead_then) = record.clock
    drift = 0.0
    if last > first:
        drift = (ahead_then - ahead) / (last - first)
    return lambda time: time + ahead + drift * (time - first)
