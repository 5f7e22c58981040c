"""How long actions take: by the host's clock, or by events on a GPU, where the host runs ahead of the work.

A call leaves two marks for each action. They become seconds when somebody asks, or when many calls have piled up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.pipeline.plan import PlannedAction
from mpipipe.trace import Recorder

MOST_CALLS = 8  # whose marks wait to be read


class Call(NamedTuple):
    """What is known of one call: its marks, and (name, start, end) of what was noted besides."""

    start: Any
    steps: Sequence[PlannedAction]
    training: bool
    marks: list
    others: list[tuple[str, float, float]]


class HostClock:
    """Durations of the actions of one rank.

    Attributes
    ----------
    now : function that makes a mark
    waits : whether reading marks waits for the device
    busy : seconds of all actions of the last call
    span : seconds from the first action of the last call to the end of the last one, where this clock knows
    totals : (op, stage) -> [seconds, count] over all training steps
    recorder : trace.Recorder, or None
    """

    now: Callable[[], Any] = staticmethod(perf_counter)
    waits = False

    def __init__(self) -> None:
        self.busy = self.span = 0.0
        self.totals: dict[tuple[str, int], list] = defaultdict(lambda: [0.0, 0])
        self.recorder: Recorder | None = None
        self.ended: deque[Call] = deque()  # calls that are not yet read
        self.running: Call | None = None
        self.counted: tuple[Sequence[PlannedAction], list[tuple[str, int]], np.ndarray] = ((), [], np.zeros(0, int))

    def begin(self, steps: Sequence[PlannedAction], training: bool) -> list:
        """Start a call; return the list that takes its marks, two for each action, in order."""
        if self.running is not None:  # it has failed
            self.end()
        while len(self.ended) > MOST_CALLS or (self.ended and self._can_read(self.ended[0])):
            self._read(self.ended.popleft())
        self.running = Call(self._start(), steps, training, [], [])
        return self.running.marks

    def end(self) -> None:
        """End the call."""
        if self.running is not None:
            self.ended.append(self.running)
            self.running = None
            if self.recorder is not None and not self.waits:
                self.settle()

    def host_seconds(self) -> float:
        """What the recorder's clock shows, if there is one."""
        return perf_counter() if self.recorder is None else self.recorder.now()

    def add(self, name: str, start: float, end: float) -> None:
        """Note something besides the actions, for the recorder; times of `host_seconds`."""
        if self.recorder is not None and self.running is not None:
            self.running.others.append((name, start, end))

    def settle(self) -> None:
        """Make the numbers of all calls that have ended final; on a GPU this waits for the last action."""
        while self.ended:
            self._read(self.ended.popleft())

    def _can_read(self, call: Call) -> bool:
        """Whether marks should be read before there are many."""
        return False

    def _start(self) -> Any:
        return None

    def _seconds(self, start: Any, marks: list) -> np.ndarray:
        """Seconds of the host's clock of each mark."""
        return np.array(marks)

    def _kinds(self, steps: Sequence[PlannedAction]) -> tuple[list[tuple[str, int]], np.ndarray]:
        """Return every (op, stage) of these steps, and the number of each step among them."""
        if self.counted[0] is not steps:  # one plan is run again and again
            kinds: dict[tuple[str, int], int] = {}
            numbers = np.array([kinds.setdefault((step.op, step.stage), len(kinds)) for step in steps], int)
            self.counted = steps, list(kinds), numbers
        return self.counted[1:]

    def _read(self, call: Call) -> None:
        count = len(call.marks) // 2  # fewer than actions after an error
        times = self._seconds(call.start, call.marks[: 2 * count]).reshape(count, 2)
        durations = times[:, 1] - times[:, 0]
        self.busy = float(durations.sum())
        if call.training:
            kinds, numbers = self._kinds(call.steps)
            seconds = np.bincount(numbers[:count], durations, len(kinds)).tolist()
            counts = np.bincount(numbers[:count], minlength=len(kinds)).tolist()
            for kind, total, times_run in zip(kinds, seconds, counts):
                entry = self.totals[kind]
                entry[0] += total
                entry[1] += times_run
        if self.recorder is not None:
            spans = [(str(step), begun, ended) for step, (begun, ended) in zip(call.steps, times.tolist())]
            for name, begun, ended in sorted([*spans, *call.others], key=lambda span: span[2]):
                self.recorder.add(name, begun, ended)


class DeviceClock(HostClock):
    """The same for actions whose work is on the current stream: marks are events, read once the work is done."""

    waits = True

    @staticmethod
    def now() -> Any:
        return arrays.record(timing=True)

    def _can_read(self, call: Call) -> bool:
        return not call.marks or arrays.is_done(call.marks[-1])

    def _start(self) -> Any:
        return self.host_seconds(), self.now()

    def _seconds(self, start: Any, marks: list) -> np.ndarray:
        self.span = 0.0
        if not marks:
            return np.zeros(0)
        zero, first = start
        if not arrays.is_done(marks[-1]):
            marks[-1].synchronize()
        self.span = arrays.seconds_between(first, marks[-1])
        return np.array([zero + arrays.seconds_between(first, mark) for mark in marks])
