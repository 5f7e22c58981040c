"""What one rank does in a step, as data: its actions in order, each with its messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from mpipipe.comm import BACKWARD, DATA, FORWARD, HEADER, Envelope, Tags
from mpipipe.schedules import Action, Schedule, Timeline, before_backwards, simulate, source
from mpipipe.text import Unit, units

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputation",
}


class Port(NamedTuple):
    """One end of a skip, where an action takes what comes over it or gives what goes over it."""

    name: str
    edge: int
    message: Envelope | None  # None if data stays on this rank
    wanted: bool = True  # False for a gradient of a stage that has no backward


class PlannedAction(NamedTuple):
    """One action of this rank.

    `receive` and `send` name its messages; None if data stays on this rank or enters or leaves the
    pipeline. Those over skips are in `takes` and `gives`.
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
    takes: tuple[Port, ...] = ()
    gives: tuple[Port, ...] = ()

    @property
    def receives(self) -> list[Envelope]:
        """All messages that it needs, in the order in which they are taken."""
        return _messages(self.receive, self.takes)

    @property
    def sends(self) -> list[Envelope]:
        """All messages that it makes, in the order in which they are sent."""
        return _messages(self.send, self.gives)

    def __str__(self) -> str:
        name = f"{self.unit}"
        if isinstance(self.unit, Unit):
            name = "{}.{}".format(*self.unit.place)
        return f"{self.stage}{self.op}{name}"


def _messages(main: Envelope | None, ports: Sequence[Port]) -> list[Envelope]:
    messages = []
    if main is not None:
        messages.append(main)
    for port in ports:
        if port.message is not None:
            messages.append(port.message)
    return messages


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
        self.activations = _activations(self.steps, whole=True)
        self.activations_and_inputs = _activations(self.steps, whole=False)


def _activations(steps: Sequence[PlannedAction], whole: bool) -> list[int]:
    """Count the activations held before the first action and after each.

    With `whole` the inputs that wait for an R do not count.
    """
    counts = [0]
    for step in steps:
        begins = step.op == "F" and step.keeps and not (whole and step.recomputed)
        change = int(begins or (whole and step.op == "R")) - (step.op in "BW")
        counts.append(counts[-1] + change)
    return counts


def _steps(schedule: Schedule, rank: int, tags: Tags) -> list[PlannedAction]:
    placement = schedule.placement
    last_stage = schedule.stages - 1
    lowest = schedule.trained_from
    chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
    order = schedule.orders[rank]
    final = {}
    for action in order:
        if action.op in "BW":
            final[action.stage] = action

    def envelope(
        edge: int, neighbour: int, unit: int, direction: int, skip: str = ""
    ) -> Envelope | None:
        """Return the name of a message between two stages; None if there is none over MPI."""
        if not 0 <= neighbour <= last_stage or placement[neighbour] == rank:
            return None
        header = tags.of(edge, unit, direction, HEADER)
        data = tags.of(edge, unit, direction, DATA)
        return Envelope(placement[neighbour], edge, unit, direction, header, data, skip)

    def ports(stage: int, unit: int, direction: int, takes: bool) -> tuple[Port, ...]:
        """Return the ends of skips over which a stage takes something, or gives something."""
        ends = []
        for edge, skip in enumerate(schedule.skips, schedule.stages):
            near = skip.source
            far = skip.target
            if takes == (direction == FORWARD):
                near, far = far, near
            if stage == near:
                is_wanted = direction == FORWARD or skip.source >= lowest
                message = None
                if is_wanted:
                    message = envelope(edge, far, unit, direction, skip.name)
                ends.append(Port(skip.name, edge, message, is_wanted))
        return tuple(ends)

    steps = []
    numbers = units(schedule.units, schedule.slices)
    for action in order:
        stage = action.stage
        op = action.op
        unit = numbers[action.microbatch]
        receive = None
        send = None
        direction = FORWARD
        if op == "F":
            receive = envelope(stage, stage - 1, unit, FORWARD)
            send = envelope(stage + 1, stage + 1, unit, FORWARD)
        elif op in "BI":
            direction = BACKWARD
            receive = envelope(stage + 1, stage + 1, unit, BACKWARD)
            if stage > lowest:
                send = envelope(stage, stage - 1, unit, BACKWARD)
        takes: tuple[Port, ...] = ()
        gives: tuple[Port, ...] = ()
        if op in "FBI":
            takes = ports(stage, unit, direction, takes=True)
            gives = ports(stage, unit, direction, takes=False)
        step = PlannedAction(
            op,
            stage,
            chunk=chunk_of[stage],
            unit=unit,
            first=stage == 0,
            last=stage == last_stage,
            receive=receive,
            send=send,
            completes=final.get(stage) == action,
            keeps=schedule.has_backward(stage),
            recomputed=(stage, unit) in schedule.recomputed,
            ends=stage == lowest,
            takes=takes,
            gives=gives,
        )
        steps.append(step)
    return steps


def receive_window(timeline: Timeline, rank: int) -> int:
    """Return the fewest posted receives by which each is there before its message is sent.

    The timeline is that of a simulation for stages of equal cost.
    """
    schedule = timeline.schedule
    needed = []  # (start of the action that receives, time at which the message is sent)
    for action, start in zip(schedule.orders[rank], timeline.starts[rank]):
        for stage in _makers(schedule, action):
            if schedule.placement[stage] != rank:
                sent = timeline.done[action.op != "F"][stage * schedule.units + action.microbatch]
                needed.append((start, sent))
    starts = [start for start, _ in needed]
    window = 1
    for index, (_, sent) in enumerate(needed):
        window = max(window, index - bisect_right(starts, sent) + 1)
    return window


def _makers(schedule: Schedule, action: Action) -> list[int]:
    """The stages whose outputs an action takes: first that of the chain."""
    stage = source(action.stage, action.op, schedule.stages)
    if stage is None:
        return []
    makers = [stage]
    for maker, taker in schedule.skip_ends:
        if action.op != "F":
            maker, taker = taker, maker
        if taker == action.stage:
            makers.append(maker)
    return makers
