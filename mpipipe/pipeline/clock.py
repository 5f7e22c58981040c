"""How long actions take: by the host's clock, or by events on a GPU, where the host runs ahead of the work.

A call leaves two marks for each action. They become seconds when somebody asks, or when many calls have piled up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.pipeline.plan import Step
from mpipipe.trace import Recorder

MOST_CALLS = 8  # whose marks wait to be read


class HostClock:
    """Durations of the actions of one rank.

    Attributes
    ----------
    now : function that makes a mark
    busy : seconds of all actions of the last call
    span : seconds from the first action of the last call to the end of the last one, where this clock knows
    totals : (op, stage) -> [seconds, count] over all training steps
    recorder : trace.Recorder, or None
    """

    now: Callable[[], Any] = staticmethod(perf_counter)

    def __init__(self) -> None:
        self.busy = self.span = 0.0
        self.totals: dict[tuple[str, int], list] = defaultdict(lambda: [0.0, 0])
        self.recorder: Recorder | None = None
        self.others: list[tuple[str, float, float]] = []
        self.calls: deque = deque()  # (start, steps, marks, training) of calls that are not yet read

    def begin(self, steps: Sequence[Step], training: bool) -> list:
        """Start a call; return the list that takes its marks, two for each step, in order."""
        while len(self.calls) > MOST_CALLS or (self.calls and self._can_read(self.calls[0])):
            self._read(*self.calls.popleft())
        marks: list = []
        self.calls.append((self._start(), steps, marks, training))
        return marks

    def add(self, name: str, start: float, end: float) -> None:
        """Note something besides the actions, for the recorder; times of time.perf_counter()."""
        if self.recorder is not None:
            self.others.append((name, start, end))

    def settle(self) -> None:
        """Make the numbers final; on a GPU this waits for the last action."""
        while self.calls:
            self._read(*self.calls.popleft())

    def _can_read(self, call: tuple) -> bool:
        """Whether marks should be read before there are many."""
        return False

    def _start(self) -> Any:
        return None

    def _seconds(self, start: Any, marks: list) -> np.ndarray:
        """Seconds of time.perf_counter() of each mark."""
        return np.array(marks)

    def _read(self, start: Any, steps: Sequence[Step], marks: list, training: bool) -> None:
        count = len(marks) // 2  # fewer than steps after an error
        times = self._seconds(start, marks[: 2 * count]).reshape(count, 2)
        durations = (times[:, 1] - times[:, 0]).tolist()
        self.busy = sum(durations)
        if training:
            totals = self.totals
            for step, seconds in zip(steps, durations):
                entry = totals[step[0], step[1]]
                entry[0] += seconds
                entry[1] += 1
        if self.recorder is not None:
            spans = [(str(step), begun, ended) for step, (begun, ended) in zip(steps, times.tolist())]
            for name, begun, ended in sorted([*spans, *self.others], key=lambda span: span[2]):
                self.recorder.add(name, begun, ended)
            self.others.clear()


class DeviceClock(HostClock):
    """The same for actions whose work is on the current stream: marks are events, read once the work is done."""

    @staticmethod
    def now() -> Any:
        return arrays.record(timing=True)

    def _can_read(self, call: tuple) -> bool:
        marks = call[2]
        return not marks or arrays.is_done(marks[-1])

    def _start(self) -> Any:
        return perf_counter(), self.now()

    def _seconds(self, start: Any, marks: list) -> np.ndarray:
        self.span = 0.0
        if not marks:
            return np.zeros(0)
        zero, first = start
        if not arrays.is_done(marks[-1]):
            marks[-1].synchronize()
        self.span = arrays.seconds_between(first, marks[-1])
        return np.array([zero + arrays.seconds_between(first, mark) for mark in marks])
