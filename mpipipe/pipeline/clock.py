"""What actions take: by the host's clock, or by events on a GPU, where the host runs ahead of the work."""

from __future__ import annotations

from collections import defaultdict, deque
from time import perf_counter

from mpipipe import arrays


class HostClock:
    """Durations of the actions of one rank.

    Attributes
    ----------
    busy : seconds of all actions of the last call
    span : seconds from the first action of the last call to the end of the last one, where this clock knows
    totals : (op, stage) -> [seconds, count] over all training steps
    recorder : trace.Recorder or None
    """

    def __init__(self):
        self.busy = self.span = 0.0
        self.totals: dict = defaultdict(lambda: [0.0, 0])
        self.recorder = None

    def begin(self):
        """Start a call."""
        self.busy = 0.0

    def now(self):
        """The mark that `add` takes."""
        return perf_counter()

    def add(self, step, start, training: bool):
        """Action `step` lasted from `start` until now."""
        self._count(step, start, perf_counter(), training)

    def _count(self, step, start, end, training):
        self.busy += end - start
        if training:
            entry = self.totals[step.op, step.stage]
            entry[0] += end - start
            entry[1] += 1
        if self.recorder is not None:
            self.recorder.add(str(step), start, end)

    def settle(self):
        """Make the numbers final."""

    def clear(self):
        """Forget the totals."""
        self.settle()
        self.totals.clear()


MOST_CALLS = 8  # that wait to be read; more events than theirs are not kept


class DeviceClock(HostClock):
    """The same for actions whose work is on the current stream: marks are events, read once the work is done.

    `settle` waits for the last action; it is called when somebody wants to know. A call that begins waits for nothing.
    """

    def __init__(self):
        super().__init__()
        self.calls: deque = deque()  # (host time and event of the beginning, marks) of calls that are not yet read

    def begin(self):
        while self.calls and (len(self.calls) > MOST_CALLS or self._over(self.calls[0])):
            self._read(self.calls.popleft())
        self.marks: list = []
        self.calls.append(((perf_counter(), self.now()), self.marks))

    def now(self):
        return arrays.record(timing=True)

    def add(self, step, start, training):
        self.marks.append((step, start, self.now(), training))

    def settle(self):
        while self.calls:
            self._read(self.calls.popleft())

    @staticmethod
    def _over(call):
        _, marks = call
        return not marks or arrays.is_done(marks[-1][2])

    def _read(self, call):
        (zero, first), marks = call
        self.busy = self.span = 0.0
        if not marks:
            return
        last = marks[-1][2]
        if not arrays.is_done(last):
            last.synchronize()
        for step, start, end, training in marks:
            begun = zero + arrays.seconds_between(first, start)
            self._count(step, begun, begun + arrays.seconds_between(start, end), training)
        self.span = arrays.seconds_between(first, last)
