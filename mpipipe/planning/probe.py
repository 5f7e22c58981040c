"""Measures layers on this rank: seconds of actions, bytes kept, optimizer and sums.

One layer of each kind runs in a stage by itself, while all other ranks do the same: they share the
memory's bandwidth as in a training. The layers take turns as in a pipeline, so that what one has
saved is not in the cache any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from statistics import median
from time import perf_counter
from typing import TypeAlias

import numpy as np

from mpipipe import nn, optim
from mpipipe.arrays import dtype as dtype_of
from mpipipe.comm import AllReduce
from mpipipe.job import group_of
from mpipipe.planning.links import repeats_in, timed_steps
from mpipipe.planning.memory import process_bytes
from mpipipe.planning.problem import MeasuredRanks
from mpipipe.planning.profile import LayerCosts, Profile, RankCosts
from mpipipe.planning.step_memory import LoneLayer, layer_bytes, lone_layers

SECONDS = 0.6  # length of a round
REPEATS = (3, 25)  # fewest and most repeats of a turn in a round
# All sizes of micro-batches take turns in them, so that all see the same machine.
ROUNDS = 3
# Two micro-batches are under way.
AGAIN = ("R", "B after R")
TURN = ("FF", "BB", AGAIN, AGAIN, "FF", "IW", "IW")


def measure_layers(measured: MeasuredRanks, action: float = 0.0) -> Profile:
    """Measure all kinds of layers on this rank, whose actions need `action`; collective.

    It is the only rank of the profile, which has no links.
    """
    problem = measured.problem
    group = group_of(measured.mesh.comm)
    times: dict[int, Times] = {size: {} for size in problem.space.sizes}
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
        costs[size] = (_costs(size_times, problem.kinds, action),)
    return Profile(
        problem.kinds,
        costs,
        links={},
        sizes=sizes,
        states=problem.states,
        trained=problem.trained_counts,
        optimizer=(median(optimizers),),
        sums=(_sums(measured),),
        process=process,
    )


# Seconds of a rank's layers, by place and action.
Times: TypeAlias = dict[int, dict[str, list[float]]]


def _costs(times: Times, kinds: Sequence[int], action: float) -> RankCosts:
    """Return the medians, for each kind of layer."""
    by_kind: dict[int, LayerCosts] = {}
    for place, actions in times.items():
        middle: dict[str, float] = defaultdict(float)
        for name, seconds in actions.items():
            middle[name] = median(seconds)
        again = max(0.0, middle["R"] + middle["B after R"] - middle["B"])
        by_kind[kinds[place]] = LayerCosts(
            middle["F"], middle["B"], middle["I"], middle["W"], again
        )
    layers = tuple([by_kind[kind] for kind in sorted(by_kind)])
    # The last layer has the loss.
    return RankCosts(layers, middle["loss"], action)


def _clock() -> Callable[[], float]:
    """Return a function that returns the seconds since now."""
    start = perf_counter()
    return lambda: perf_counter() - start


def _turn(timers: Sequence[LoneLayer]) -> None:
    """Go backwards in one go, in one go after the forward was run again, and in two."""
    trained = [*filter(attrgetter("trained"), reversed(timers))]
    for actions in TURN:
        for name in actions:
            for timer in timers if name in ("F", "R") else trained:
                timer.act(name)


def _round(measured: MeasuredRanks, size: int, times: Times) -> float:
    """Time the layers; return the seconds of clipping and optimizer for a parameter; collective."""
    example = measured.example(size, 1)
    timers: list[LoneLayer] = []
    with np.errstate(all="ignore"):
        for timer in lone_layers(measured, example, size, {}, _clock):
            if timer not in timers:
                timers.append(timer)
                with timer.head():
                    timer.forward()
                timer.kept.clear()
        # The last layer has the loss.
        with timers[-1].head():
            seconds = _clock()
            _turn(timers)
            # A ring has messages in each turn: all ranks must make the same number of turns.
            everyone = group_of(measured.mesh.comm).gather("plan: the seconds of a turn", seconds())
            for timer in timers:
                timer.actions = times.setdefault(timer.stage.first, defaultdict(list))
            for _ in range(repeats_in(SECONDS, max(everyone), REPEATS)):
                _turn(timers)
    return _optimizer(measured, [timer.stage for timer in timers])


def _optimizer(measured: MeasuredRanks, stages: Sequence[nn.Stage]) -> float:
    optimizer = measured.optimizer(stages, None)
    scaler = measured.scaler()
    seconds = []
    for _ in range(1 + REPEATS[0]):
        for stage in stages:
            stage.gradients.flat[:] = 1
        elapsed = _clock()
        optim.scaled_step(optimizer, scaler, measured.clip, lr=optimizer.lr)
        seconds.append(elapsed())
    count = sum(stage.gradients.flat.size for stage in stages)
    return median(seconds[1:]) / max(1, count)


def _sums(measured: MeasuredRanks) -> float:
    """Return the seconds of the sum over replicas for one parameter; collective."""
    replicas = measured.mesh.replicas
    problem = measured.problem
    if replicas.size == 1:
        return 0.0
    count = max(1, *problem.trained_counts)
    gradients = np.zeros(count, dtype_of(problem.dtype))
    group = group_of(replicas)

    def step() -> None:
        group.wait(AllReduce(replicas, gradients), "plan: the sum over the replicas")

    return median(timed_steps(group_of(measured.mesh.comm), step, 1 + REPEATS[0])) / count
