"""A record of what a rank did when. Nothing is recorded unless a Recorder is handed in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple


class Span(NamedTuple):
    """Something that lasted; times in seconds of the recorder's clock."""

    name: str
    start: float
    end: float


class Wait(NamedTuple):
    """A wait for other ranks; times in seconds of the recorder's clock."""

    what: object  # the Envelope of a message, or a text
    start: float
    end: float
    # The key of the group whose ranks all had to come; None if one rank had to.
    group: tuple[int, ...] | None


class Sent(NamedTuple):
    """A message that was handed over to be sent.

    Its name is edge, micro-batch, and direction (0 for an activation, 1 for a gradient). Of S
    stages, edge e below S joins stages e - 1 and e, and edge S + i is skip i of the schedule.
    """

    message: tuple[int, int, int]
    peer: int  # the rank of the pipeline that it goes to
    nbytes: int
    time: float  # seconds of the recorder's clock


class Recorder:
    """What one rank did, in seconds of the clock `now`; `pipeline.recorder = Recorder()`."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        # Actions, starts of sums over replicas, and the optimizer, as they ended.
        self.spans: list[Span] = []
        self.waits: list[Wait] = []  # within steps, and within `optimizer`
        self.sent: list[Sent] = []
        self.steps: list[Span] = []  # training steps that have ended, with the optimizer after them
        self._begun = 0.0
        self._reads: float | None = None  # when the wait for the batch of the next step began
        self._thread: int | None = None  # the one whose waits count, while they do

    def add(self, name: str, start: float, end: float) -> None:
        self.spans.append(Span(name, start, end))

    def begin_step(self) -> None:
        """Note that a training step begins on this thread."""
        now = self.now()
        self._begun = now
        if self._reads is not None:
            self._begun = self._reads
        self._thread = threading.get_ident()
        self._reads = None

    def end_step(self) -> None:
        self.steps.append(Span("step", self._begun, self.now()))
        self._thread = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note that the block is the wait for a batch, with which the next step begins."""
        self._reads = self.now()
        yield
        self.add("read", self._reads, self.now())

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Note that the block is the optimizer of the last step, which ends with the block."""
        start = self.now()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            end = self.now()
            self._thread = None
            self.add("optimizer", start, end)
            if self.steps:
                self.steps[-1] = self.steps[-1]._replace(end=end)

    @contextmanager
    def waiting(self, what: object, group: tuple[int, ...] | None) -> Iterator[None]:
        """Note that the block is a wait, in steps and on their thread."""
        if self._thread != threading.get_ident():
            yield
            return
        start = self.now()
        try:
            yield
        finally:
            self.waits.append(Wait(what, start, self.now(), group))

    def send(self, message: tuple[int, int, int], peer: int, nbytes: int) -> None:
        self.sent.append(Sent(message, peer, nbytes, self.now()))
