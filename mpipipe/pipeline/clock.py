"""How long actions take: by the host's clock, or by events on a GPU.

A call leaves two marks for each action. They become seconds when somebody asks, or when many calls
have piled up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.pipeline.plan import PlannedAction
from mpipipe.trace import Recorder

# A mark: seconds of the host's clock, or an event on a GPU.
Mark: TypeAlias = "float | arrays.Event"


class TimedCall(NamedTuple):
    """What is known of one call: its marks, and (name, start, end) of what was noted besides."""

    start: tuple[Mark, float]  # the mark on a GPU, and its time on the host
    actions: Sequence[PlannedAction]
    training: bool
    marks: list
    others: list[tuple[str, float, float]]


@dataclass(eq=False)
class HostClock:
    """Durations of the actions of one rank, by marks that `now` makes."""

    unread: ClassVar[int] = 0  # calls whose marks wait to be read: on a GPU that is waiting

    # By the clock of the recorder, if there is one.
    host_now: Callable[[], float] = perf_counter
    now: Callable[[], Mark] = perf_counter  # makes a mark
    busy: float = 0.0  # seconds of all actions of the last call
    # From the first action of the last call to the end of the last one, where this clock knows.
    span: float = 0.0
    # Seconds of the last call by the host's clock, and its start.
    host_elapsed: float = 0.0
    entered: float = 0.0
    # Of the training steps that were read: how many, their actions, and the seconds of each action.
    steps: int = 0
    actions: Sequence[PlannedAction] = ()
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(1))
    # Seconds of all training steps so far, in actions and in all; on a GPU as far as marks were
    # read.
    training_seconds: np.ndarray = field(default_factory=lambda: np.zeros(2))
    recorder: Recorder | None = None
    ended: deque[TimedCall] = field(default_factory=deque)  # calls that are not yet read
    # Of the call under way: whether it is a training step, its start, and other notes.
    trains: bool = False
    start: tuple[Mark, float] = (0.0, 0.0)
    others: list[tuple[str, float, float]] = field(default_factory=list)

    def enter(self) -> None:
        """Note that a call has been entered: its ranks have not agreed yet."""
        self.entered = perf_counter()

    def leave(self) -> None:
        self.host_elapsed = perf_counter() - self.entered
        if self.trains and not self.unread:
            self.training_seconds[1] += self.host_elapsed
        self.trains = False

    @property
    def elapsed(self) -> float:
        return max(self.host_elapsed, self.span)

    def begin(self, training: bool) -> None:
        """Begin a call."""
        self.trains = training
        self.start = self._start()
        self.others = []

    def end(self, actions: Sequence[PlannedAction], marks: list) -> None:
        """End a call, which has left two marks for each action, in order."""
        self.ended.append(TimedCall(self.start, actions, self.trains, marks, self.others))
        while len(self.ended) > self.unread:
            self._read(self.ended.popleft())

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder note actions from now on, by its clock; None ends that."""
        self.settle()
        self.recorder = recorder
        self.host_now = perf_counter
        if recorder is not None:
            self.host_now = recorder.now
        if not self.unread:
            self.now = self.host_now

    def add(self, name: str, start: float, end: float) -> None:
        """Note something besides the actions, for the recorder; times of `host_now`."""
        self.others.append((name, start, end))

    def settle(self) -> None:
        """Make the numbers of all calls final; on a GPU this waits for the last action."""
        while self.ended:
            self._read(self.ended.popleft())

    def forget(self) -> None:
        """Count the seconds of actions anew."""
        self.settle()
        self.steps = 0
        self.seconds = np.zeros(1)

    def means(self, stages: int, recompute: bool) -> np.ndarray:
        """Return mean seconds of forward, input gradient and weight gradient, (3, stages).

        They are 0 for stages on other ranks.

        An R counts as a forward; with `recompute` as a part of the input gradient, for the user's
        schedule has no R.
        """
        self.settle()
        rows = {"F": 0, "B": 1, "I": 1, "W": 2, "R": int(recompute)}
        seconds, counts = np.zeros((2, 3, stages))
        for action, total in zip(self.actions, self.seconds):
            # A stage may have both B and I: it may split some backwards only.
            place = rows[action.op], action.stage
            seconds[place] += total
            if action.op != "R" or not recompute:
                counts[place] += self.steps
        return seconds / np.maximum(counts, 1)

    def _start(self) -> tuple[Mark, float]:
        return 0.0, 0.0

    def _seconds(self, start: tuple[Mark, float], marks: list) -> np.ndarray:
        """Seconds of the host's clock of each mark."""
        return np.array(marks)

    def _read(self, call: TimedCall) -> None:
        times = self._seconds(call.start, call.marks).reshape(-1, 2)
        durations = times[:, 1] - times[:, 0]
        self.busy = float(durations.sum())
        if call.training:
            self.training_seconds += self.busy, self.span
            self.steps += 1
            self.actions = call.actions
            self.seconds = self.seconds + durations
        if self.recorder is not None:
            spans = call.others
            for action, (begun, ended) in zip(call.actions, times.tolist()):
                spans.append((str(action), begun, ended))
            for span in sorted(spans, key=itemgetter(2)):
                self.recorder.add(*span)


@dataclass(eq=False)
class DeviceClock(HostClock):
    """The clock of a GPU: marks are events on the current stream, read once the work is done."""

    unread = 8

    def __post_init__(self) -> None:
        self.now = partial(arrays.record, timing=True)

    def _start(self) -> tuple[Mark, float]:
        return self.now(), self.host_now()

    def _seconds(self, start: tuple[Mark, float], marks: list) -> np.ndarray:
        first, zero = start
        seconds = np.zeros(len(marks))
        if marks:
            if not arrays.is_done(marks[-1]):
                marks[-1].synchronize()
            seconds[:] = [arrays.seconds_between(first, mark) for mark in marks]
        self.span = seconds.max(initial=0.0)
        return zero + seconds
