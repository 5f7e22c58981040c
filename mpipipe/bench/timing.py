"""Candidates that take turns in one run, times on the device, and how both are reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Annotated, TypeAlias

import numpy as np

from mpipipe import arrays, cli
from mpipipe.arrays import DeviceArray, Shape
from mpipipe.cli import show
from mpipipe.job import Communicator, group_of
from mpipipe.options import Option

Call: TypeAlias = "Callable[[], object]"  # a function to measure
Repeats = Annotated[int, Option("measured turns of each candidate; medians are shown", least=1)]


def on_ranks(measure: Callable[..., None]) -> Callable[..., int]:
    """Make a command of a measurement on all ranks, which have one thread each."""
    return cli.on_ranks(measure, threads=lambda: 1)


def compare(
    comm: Communicator, candidates: Sequence[Call], repeats: int, warmup: int = 3
) -> list[float]:
    """Return the median seconds of each candidate on the slowest rank, in turns."""
    group = group_of(comm)
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(warmup + repeats):
        for candidate, measured in zip(candidates, times):
            group.agree("bench: the start of a turn")
            start = perf_counter()
            candidate()
            seconds = max(group.gather("bench: the seconds of a turn", perf_counter() - start))
            if turn >= warmup:
                measured.append(seconds)
    return [*map(median, times)]


def report(
    comm: Communicator, name: str, measured: str, ratio: float | None = None, goal: str = ""
) -> None:
    """Print a line on rank 0: what was measured, and its ratio to its peer."""
    if comm.rank == 0:
        if ratio is not None:
            measured += f"; ratio {ratio:.2f} ({goal})"
        show(f"{name}: {measured}\n")


# -- A number beside its peer: as a table for people, and as JSON for programs ---------------------


@dataclass(frozen=True)
class Row:
    """One measurement: a rate or a share; more is better unless `goal` says otherwise."""

    what: str  # sizes included
    value: float
    unit: str
    peer: str = ""  # a published number says so in its name
    peer_value: float | None = None
    goal: str = ""  # for the ratio to the peer, or for the value where there is no peer

    @property
    def ratio(self) -> float | None:
        if self.peer_value is None:
            return None
        return self.value / self.peer_value

    def facts(self) -> dict[str, str | float | None]:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        text = f"{self.what}: {self.value:.4g} {self.unit}".rstrip()
        if self.ratio is not None:
            text += f"; {self.peer} {self.peer_value:.4g}, ratio {self.ratio:.3f}"
        if self.goal:
            text += f" ({self.goal})"
        return text


# -- Times on the device, between events -----------------------------------------------------------


WARMUP = 2
BLOCK = 1 << 20


def seconds(call: Call, repeats: int) -> float:
    """Return the median device time of `call()`, after some calls that are not counted."""
    for _ in range(WARMUP):
        call()
    marks = []
    for _ in range(repeats):
        start = arrays.record(timing=True)
        call()
        marks.append((start, arrays.record(timing=True)))
    marks[-1][1].synchronize()
    return median(arrays.seconds_between(start, end) for start, end in marks)


def normal(shape: Shape, dtype: str, seed: int = 0) -> DeviceArray:
    """Return a device array of random values. Those of a long array repeat after 2^20."""
    count = int(np.prod(shape))
    kind = arrays.dtype(dtype)
    values = np.random.default_rng(seed).standard_normal(min(count, BLOCK), np.float32)
    return arrays.upload(np.resize(values.astype(kind), shape))
