"""What one rank does in a step: its actions in the order of the schedule, each with its messages.

A plan is data. `Plan(schedule, rank, tags)` turns the actions of one rank into Steps, names every message with its
Envelope, and finds how far ahead receives must be posted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from mpipipe.comm.mailbox import Envelope
from mpipipe.comm.tags import BACKWARD, DATA, FORWARD, HEADER, Tags
from mpipipe.schedules import Action, Schedule, simulate

Moment: TypeAlias = tuple[float, int, str, int]  # (end by simulation, stage, op, micro-batch): no two are equal


class PlannedAction(NamedTuple):
    """One action of this rank.

    `receive` and `send` name its messages; None where data stays on this rank or enters or leaves the pipeline.
    """

    op: str  # F, B (full backward), I (input gradient), W (weight gradient), R (the forward again)
    stage: int  # logical
    chunk: int  # index among this rank's stages
    microbatch: int
    first: bool  # the stage where inputs enter
    last: bool  # the stage where the loss is
    receive: Envelope | None
    send: Envelope | None
    completes: bool  # no later action adds to this stage's gradients
    moment: Moment  # when it ends, in an order of all actions of all ranks
    keeps: bool  # a backward follows in a training step
    recomputed: bool  # an R stands between the F and the backward
    ends: bool  # the backwards end here: no stage before has one

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Plan:
    """The steps of `rank`.

    Attributes
    ----------
    steps : list of PlannedAction
    receives : Envelope of every message that this rank receives, in the order in which its steps need them
    sends : Envelope of every message that this rank sends, in the order in which its steps make them
    moments : Envelope -> Moment of the end of the action that makes the message: an order of all messages of all ranks,
        by which each action comes after the messages that it needs
    window : number of receives kept posted ahead: the smallest number for which, with stages of equal cost, each
        receive is posted before its message is sent
    """

    def __init__(self, schedule: Schedule, rank: int, tags: Tags):
        spans = simulate(schedule).spans
        ends = {action: end for row in spans for action, _, end in row}
        self.steps = _steps(schedule, rank, tags, ends)
        self.moments = {step.send: step.moment for step in self.steps if step.send is not None}
        for step in self.steps:
            if step.receive is not None:
                self.moments[step.receive] = _made(Action(step.stage, step.op, step.microbatch), schedule.stages, ends)
        self.receives = [step.receive for step in self.steps if step.receive is not None]
        self.sends = [step.send for step in self.steps if step.send is not None]
        self.window = receive_window(schedule, rank) if self.receives else 0


def _moment(action: Action, ends: Mapping[Action, float]) -> Moment:
    stage, op, microbatch = action
    return ends[action], stage, op, microbatch


def _made(action: Action, stages: int, ends: Mapping[Action, float]) -> Moment:
    """When the message is made that an action needs."""
    producer = _producer(action, stages)
    assert producer is not None  # an action without one receives no message
    stage, op, microbatch = producer
    if producer not in ends:  # the neighbour does not split its backward where this rank does, or the reverse
        op = "B" if op == "I" else "I"
    return _moment(Action(stage, op, microbatch), ends)


def _steps(schedule: Schedule, rank: int, tags: Tags, ends: Mapping[Action, float]) -> list[PlannedAction]:
    placement, last_stage, lowest = schedule.placement, schedule.stages - 1, schedule.trained_from
    chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
    final = {action.stage: action for action in schedule.orders[rank] if action.op in "BW"}

    def envelope(edge: int, neighbour: int, microbatch: int, direction: int) -> Envelope | None:
        if not 0 <= neighbour <= last_stage or placement[neighbour] == rank:
            return None
        names = (tags.of(edge, microbatch, direction, part) for part in (HEADER, DATA))
        return Envelope(placement[neighbour], edge, microbatch, direction, *names)

    steps = []
    for action in schedule.orders[rank]:
        stage, op, microbatch = action
        receive = send = None
        if op == "F":
            receive = envelope(stage, stage - 1, microbatch, FORWARD)
            send = envelope(stage + 1, stage + 1, microbatch, FORWARD)
        elif op in "BI":
            receive = envelope(stage + 1, stage + 1, microbatch, BACKWARD)
            send = envelope(stage, stage - 1, microbatch, BACKWARD) if stage > lowest else None
        facts = stage == 0, stage == last_stage, receive, send, final.get(stage) == action
        again = (stage, microbatch) in schedule.recomputed
        limits = schedule.has_backward(stage), again, stage == lowest
        steps.append(PlannedAction(op, stage, chunk_of[stage], microbatch, *facts, _moment(action, ends), *limits))
    return steps


def receive_window(schedule: Schedule, rank: int) -> int:
    """Receives to keep posted so that each is there before its message is sent, for stages of equal cost."""
    placement = schedule.placement
    spans = simulate(schedule).spans
    ends = {action: end for row in spans for action, _, end in row}
    needed = []  # (start of the action that receives, time at which the message is sent)
    for action, start, _ in spans[rank]:
        producer = _producer(action, schedule.stages)
        if producer is not None and placement[producer[0]] != rank:
            sent = ends.get(Action(*producer))
            if sent is None:  # the neighbour does not split its backward where this rank does, or the reverse
                stage, op, microbatch = producer
                sent = ends[Action(stage, "B" if op == "I" else "I", microbatch)]
            needed.append((start, sent))
    starts = [start for start, _ in needed]
    ahead = [index - bisect_right(starts, sent) + 1 for index, (_, sent) in enumerate(needed)]
    return max([1, *ahead])


def _producer(action: Action, stages: int) -> tuple[int, str, int] | None:
    """(stage, op, microbatch) of the action on another stage whose result `action` needs, or None."""
    stage, op, microbatch = action
    if op == "F":
        return (stage - 1, "F", microbatch) if stage > 0 else None
    if op in "BI":
        return (stage + 1, op, microbatch) if stage < stages - 1 else None
    return None


def recomputes_all(schedule: Schedule, stages: Sequence[int]) -> bool:
    """Whether every forward of these stages that has a backward is run again."""
    trained = [stage for stage in stages if schedule.has_backward(stage)]
    again = sum(stage in trained for stage, _ in schedule.recomputed)
    return bool(trained) and again == len(trained) * schedule.microbatches
