"""What one rank does in a step, as data: its actions in order, each with its messages."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from mpipipe.comm import BACKWARD, DATA, FORWARD, HEADER, Envelope, Tags
from mpipipe.schedules import Schedule, Timeline, before_backwards, simulate
from mpipipe.text import Unit, units

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputation",
}


class Port(NamedTuple):
    """One end of an edge, where an action takes what comes over it or gives what goes over it."""

    name: str  # "" for the edge of the chain
    edge: int
    message: Envelope | None  # None if data stays on this rank
    wanted: bool = True  # False for a gradient of a stage that has no backward


class PlannedAction(NamedTuple):
    """One action of this rank.

    `receive` and `send` name its messages; None if data stays on this rank or enters or leaves the
    pipeline. The ends of skips follow that of the chain in `takes` and `gives`.
    """

    op: str  # F, B (full backward), I (input gradient), W (weight gradient), R (the forward again)
    stage: int  # logical
    chunk: int  # index among this rank's stages
    unit: int  # without slices the micro-batch
    first: bool  # the stage where inputs enter
    last: bool  # the stage where the loss is
    receive: Envelope | None
    send: Envelope | None
    completes: bool  # no later action adds to this stage's gradients
    keeps: bool  # a backward follows in a training step
    recomputed: bool  # an R stands between the F and the backward
    ends: bool  # the backwards end here: no stage before has one
    takes: list[Port]
    gives: list[Port]
    receives: list[Envelope]  # all messages that it needs, in the order in which they are taken
    sends: list[Envelope]  # all messages that it makes, in the order in which they are sent

    def __str__(self) -> str:
        name = f"{self.unit}"
        if isinstance(self.unit, Unit):
            name = "{}.{}".format(*self.unit.place)
        return f"{self.stage}{self.op}{name}"


class Plans:
    """The plans of one rank: of a training step, and of forwards alone."""

    def __init__(self, schedule: Schedule, rank: int, tags: Tags, recompute: bool):
        self.schedule = schedule
        self.rank = rank
        self.tags = tags
        # True if the user asked for an R before each backward; the schedule may have its own.
        self.recompute = recompute
        trained = schedule
        if recompute:
            trained = before_backwards(schedule)
        self.training = ActionPlan(trained, rank, tags)
        # Most activations held at once in a training step.
        self.peak_activations = 0
        activations = 0
        for step in self.training.steps:
            begins = step.op == "F" and step.keeps
            if step.recomputed and not recompute:
                # An input that waits for the R of the user's schedule does not count.
                begins = step.op == "R"
            activations += begins - (step.op in "BW")
            self.peak_activations = max(self.peak_activations, activations)
        # By the number of micro-batches.
        self._forward: dict[int, ActionPlan] = {}

    def forward(self, microbatches: int) -> ActionPlan:
        """Return the plan of a call without backwards."""
        if microbatches not in self._forward:
            part = self.schedule.forward_only_part(microbatches)
            self._forward[microbatches] = ActionPlan(part, self.rank, self.tags)
        return self._forward[microbatches]


class ActionPlan:
    """The actions of one rank, its messages in the order of these, and its window of receives."""

    def __init__(self, schedule: Schedule, rank: int, tags: Tags):
        self.schedule = schedule
        self.steps = _steps(schedule, rank, tags)
        self.receives: list[Envelope] = []
        self.sends: list[Envelope] = []
        for step in self.steps:
            self.receives += step.receives
            self.sends += step.sends
        self.window = 0
        if self.receives:
            self.window = receive_window(simulate(schedule), rank)


def _steps(schedule: Schedule, rank: int, tags: Tags) -> list[PlannedAction]:
    placement = schedule.placement
    last_stage = schedule.stages - 1
    lowest = schedule.trained_from
    # The last action of each stage that adds to its gradients.
    final = {action.stage: action for action in schedule.orders[rank] if action.op in "BW"}
    edges = {stage: edges_of(schedule, stage) for stage in schedule.stages_of(rank)}
    chunk_of = {stage: chunk for chunk, stage in enumerate(edges)}

    steps = []
    numbers = units(schedule.units, schedule.slices)
    for action in schedule.orders[rank]:
        stage = action.stage
        unit = numbers[action.microbatch]
        direction = BACKWARD
        if action.op == "F":
            direction = FORWARD
        takes: list[Port] = []
        gives: list[Port] = []
        for edge, source, target, name in edges[stage]:
            # A forward takes what comes over the edges that end at its stage, and gives to those
            # that begin there. A backward does the reverse.
            ends_here = stage == target
            far = source if ends_here else target
            side = gives
            if ends_here == (direction == FORWARD):
                side = takes
            is_wanted = direction == FORWARD or source >= lowest
            message = None
            if action.op in "FBI" and is_wanted and 0 <= far <= last_stage:
                if placement[far] != rank:
                    header = tags.of(edge, unit, direction, HEADER)
                    data = tags.of(edge, unit, direction, DATA)
                    message = Envelope(placement[far], edge, unit, direction, header, data, name)
            side.append(Port(name, edge, message, is_wanted))
        step = PlannedAction(
            action.op,
            stage,
            chunk=chunk_of[stage],
            unit=unit,
            first=stage == 0,
            last=stage == last_stage,
            receive=takes[0].message,
            send=gives[0].message,
            completes=final.get(stage) == action,
            keeps=schedule.has_backward(stage),
            recomputed=(stage, unit) in schedule.recomputed,
            ends=stage == lowest,
            takes=takes,
            gives=gives,
            receives=[port.message for port in takes if port.message is not None],
            sends=[port.message for port in gives if port.message is not None],
        )
        steps.append(step)
    return steps


def edges_of(schedule: Schedule, stage: int) -> list[tuple[int, int, int, str]]:
    """Return (number, source, target, name) of the edges of a stage: of the chain, then skips."""
    edges = [(stage, stage - 1, stage, ""), (stage + 1, stage, stage + 1, "")]
    for number, skip in enumerate(schedule.skips, schedule.stages):
        if stage in (skip.source, skip.target):
            edges.append((number, skip.source, skip.target, skip.name))
    return edges


def receive_window(timeline: Timeline, rank: int) -> int:
    """Return the fewest posted receives by which each is there before its message is sent.

    The timeline is that of a simulation for stages of equal cost.
    """
    schedule = timeline.schedule
    edges = {stage: edges_of(schedule, stage) for stage in schedule.stages_of(rank)}
    needed = []  # (start of the action that receives, time at which the message is sent)
    for action, start in zip(schedule.orders[rank], timeline.starts[rank]):
        if action.op not in "FBI":
            continue
        is_backward = action.op != "F"
        for _, maker, taker, _ in edges[action.stage]:
            if is_backward:
                maker, taker = taker, maker
            if taker != action.stage or not 0 <= maker < schedule.stages:
                continue
            if schedule.placement[maker] != rank:
                sent = timeline.done[is_backward][maker * schedule.units + action.microbatch]
                needed.append((start, sent))
    starts = [start for start, _ in needed]
    window = 1
    for index, (_, sent) in enumerate(needed):
        window = max(window, index - bisect_right(starts, sent) + 1)
    return window
