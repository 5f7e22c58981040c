"""Measures layers on this rank: seconds of actions, bytes kept, optimizer and sums.

One layer of each kind runs in a stage by itself, while all other ranks do the same: they share the
memory's bandwidth as in a training. The layers take turns as in a pipeline, so that what one has
saved is not in the cache any more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np

from mpipipe import nn, optim, schedules
from mpipipe.arrays import Tree
from mpipipe.arrays import dtype as dtype_of
from mpipipe.job import group_of
from mpipipe.planning.links import repeats_in, step_seconds
from mpipipe.planning.memory import process_bytes
from mpipipe.planning.problem import MeasuredRanks
from mpipipe.planning.profile import LayerCosts, RankCosts, Sizes
from mpipipe.planning.step_memory import LoneLayer, Result, layer_bytes, lone_layers

SECONDS = 0.6  # length of a round
REPEATS = (3, 25)  # fewest and most repeats of a turn in a round
# All sizes of micro-batches take turns in them, so that all see the same machine.
ROUNDS = 3
UNDER_WAY = 2  # micro-batches


@dataclass
class MeasuredLayers:
    """Costs and sizes of one rank for each size of micro-batch, and seconds for a parameter.

    `process` are the bytes of a process that trains, without arrays.
    """

    costs: dict[int, RankCosts]
    sizes: dict[int, list[Sizes]]
    process: int
    optimizer: float
    sums: float

    @property
    def seconds(self) -> float:
        """Seconds of forwards and backwards of all kinds of layers and sizes."""
        total = 0.0
        for rank in self.costs.values():
            for layer in rank.layers:
                total += layer.forward + layer.backward
        return total


def measure_layers(measured: MeasuredRanks, action: float = 0.0) -> MeasuredLayers:
    """Measure all kinds of layers on this rank, whose actions need `action`; collective."""
    group = group_of(measured.mesh.comm)
    times: dict[int, Times] = {size: {} for size in measured.problem.space.sizes}
    sizes = {}
    process = 0
    for size in times:
        with group.raise_together("plan: the bytes of the layers"):  # see `tracing`
            sizes[size], _ = layer_bytes(measured, measured.example(size, 1), size)
        # A training has one size, and libraries keep something for each.
        process = process or process_bytes()
    optimizers: list[float] = []
    for _ in range(ROUNDS):
        for size, size_times in times.items():
            optimizers.append(_round(measured, size, size_times))
    costs = {}
    for size, size_times in times.items():
        costs[size] = _costs(size_times, measured.problem.kinds, action)
    return MeasuredLayers(costs, sizes, process, median(optimizers), _sums(measured))


# Seconds of a rank's layers, by place and action.
Times: TypeAlias = dict[int, dict[str, list[float]]]


def _costs(times: Times, kinds: Sequence[int], action: float) -> RankCosts:
    """Return the medians, for each kind of layer."""
    by_kind: dict[int, LayerCosts] = {}
    for place, actions in times.items():
        middle = dict.fromkeys(("F", "B", "I", "W", "R", "B after R"), 0.0)
        for name, seconds in actions.items():
            middle[name] = median(seconds)
        again = max(0.0, middle["R"] + middle["B after R"] - middle["B"])
        by_kind[kinds[place]] = LayerCosts(
            middle["F"], middle["B"], middle["I"], middle["W"], again
        )
    layers = tuple([by_kind[kind] for kind in sorted(by_kind)])
    # The last layer has the loss.
    return RankCosts(layers, middle["loss"], action)


@dataclass(eq=False)
class Timer(LoneLayer):
    """Times the actions of a layer. `kept` is what forwards left for backwards."""

    actions: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept: deque[tuple[Tree, nn.Saved]] = field(default_factory=deque)

    def run(self, name: str, call: Callable[..., Result], *arguments: object) -> Result:
        start = perf_counter()
        result = call(*arguments)
        self.actions[name].append(perf_counter() - start)
        return result

    def forward(self, name: str = "F") -> tuple[Tree, nn.Saved]:
        y, saved = super().forward(name)
        if self.trained:
            self.kept.append((self.gradient, saved))
        return y, saved

    def backward(self, name: str) -> None:
        self.run(name, self.stage.backward, *self.kept.popleft())

    def split(self) -> nn.Pending:
        return self.run("I", self.stage.backward_input, *self.kept.popleft())[1]


def _turn(timers: Sequence[Timer]) -> None:
    """Go backwards in one go, in one go after the forward was run again, and in two."""
    trained = [*filter(attrgetter("trained"), reversed(timers))]
    for _ in range(UNDER_WAY):
        for timer in timers:
            timer.forward("F")
    for _ in range(UNDER_WAY):
        for timer in trained:
            timer.backward("B")
    for _ in range(UNDER_WAY):
        for timer in timers:
            timer.forward("R")
        for timer in trained:
            timer.backward("B after R")
    for _ in range(UNDER_WAY):
        for timer in timers:
            timer.forward("F")
    for _ in range(UNDER_WAY):
        pending = [timer.split() for timer in trained]
        for timer, products in zip(trained, pending):
            timer.run("W", timer.stage.backward_weight, products)


def _round(measured: MeasuredRanks, size: int, times: Times) -> float:
    """Time the layers; return the seconds of clipping and optimizer for a parameter; collective."""
    example = measured.example(size, 1)
    timers: list[Timer] = []
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))

        for timer in lone_layers(measured, example, size, {}, Timer):
            if timer.shapes is None:
                stack.enter_context(timer.taking_head())
                timers.append(timer)
                timer.forward()
                timer.kept.clear()
        start = perf_counter()
        _turn(timers)
        # A ring has messages in each turn: all ranks must make the same number of turns.
        seconds = group_of(measured.mesh.comm).gather(
            "plan: the seconds of a turn", perf_counter() - start
        )
        for timer in timers:
            timer.actions = times.setdefault(timer.stage.first, defaultdict(list))
        for _ in range(repeats_in(SECONDS, max(seconds), REPEATS)):
            _turn(timers)
    return _optimizer(measured, [timer.stage for timer in timers])


def _optimizer(measured: MeasuredRanks, stages: Sequence[nn.Stage]) -> float:
    optimizer = measured.optimizer(stages, None)
    scaler = measured.scaler()
    seconds = []
    for _ in range(1 + REPEATS[0]):
        for stage in stages:
            stage.gradients.flat[:] = 1
        start = perf_counter()
        optim.scaled_step(optimizer, scaler, measured.clip, lr=optimizer.lr)
        seconds.append(perf_counter() - start)
    count = sum(stage.gradients.flat.size for stage in stages)
    return median(seconds[1:]) / max(1, count)


def _sums(measured: MeasuredRanks) -> float:
    """Return the seconds of the sum over replicas for one parameter; collective."""
    replicas = measured.mesh.replicas
    problem = measured.problem
    if replicas.size == 1:
        return 0.0
    count = max(1, *problem.trained_counts)
    gradients = SimpleNamespace(flat=np.zeros(count, dtype_of(problem.dtype)))
    group = group_of(measured.mesh.comm)
    solo = group.split(measured.mesh.rank, 0, "plan: a rank by itself")
    schedule = schedules.gpipe(1, 1)
    array = np.zeros(1)
    alone = step_seconds(solo, schedule, array, gradients)
    summed = step_seconds(solo, schedule, array, gradients, replicas)
    group.agree("plan: all ranks have measured sums")
    solo.Free()
    return max(0.0, summed - alone) / count
