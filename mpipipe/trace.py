"""A record of what a rank did when. Nothing is recorded unless a Recorder is handed in."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Something that lasted; times in seconds of time.perf_counter()."""

    name: str
    start: float
    end: float


class Recorder:
    """Spans in the order in which they ended. Set `pipeline.recorder = Recorder()` to switch recording on."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, name: str, start: float, end: float) -> None:
        """Note something that lasted."""
        self.spans.append(Span(name, start, end))
