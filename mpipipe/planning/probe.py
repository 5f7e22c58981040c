"""Measures a training on all ranks: seconds of layers and messages, and bytes.

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

from mpipipe.job import group_of
from mpipipe.planning.links import measure_action, measure_link, repeats_in
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


def measure(measured: MeasuredRanks) -> Profile:
    """Measure layers and messages of this rank's pipeline; collective over all ranks."""
    problem = measured.problem
    pipe = measured.mesh.pipe
    group = group_of(measured.mesh.comm)
    action = measure_action(measured)
    links = {}
    sizes = {}
    process = 0
    for size in problem.space.sizes:
        with group.raise_together("plan: the bytes of the layers"):  # see `tracing`
            sizes[size], _ = layer_bytes(measured, measured.example(size, 1), size)
        message = max((layer.input for layer in sizes[size][1:]), default=0)
        links[size] = measure_link(pipe, message, action)
        # A training has one size, and libraries keep something for each.
        process = process or process_bytes()
    everyone = group.gather(
        "plan: what all ranks have measured", (pipe.rank, layer_costs(measured, action))
    )
    slowest: dict[int, tuple[RankCosts, ...]] = {}
    for size in sizes:
        # Replicas wait for the slowest of them, at each place of the pipeline.
        ranks = sorted([(place, costs[size]) for place, costs in everyone], key=_computing)
        slowest[size] = tuple([costs for _, costs in sorted(dict(ranks).items())])
    return Profile(
        problem.kinds,
        costs=slowest,
        links=links,
        sizes=sizes,
        states=problem.states,
        process=max(group.gather("plan: the bytes of processes", process)),
    )


def _computing(of_place: tuple[int, RankCosts]) -> float:
    """Return the seconds of forwards and backwards of all kinds of layers."""
    return sum(layer.forward + layer.backward for layer in of_place[1].layers)


# Seconds of a rank's layers, by kind and action.
Times: TypeAlias = dict[int, dict[str, list[float]]]


def layer_costs(measured: MeasuredRanks, action: float = 0.0) -> dict[int, RankCosts]:
    """Time all kinds of layers on this rank, whose actions need `action`; collective."""
    times: dict[int, Times] = {size: {} for size in measured.problem.space.sizes}
    for _ in range(ROUNDS):
        for size, size_times in times.items():
            _round(measured, size, size_times)
    costs = {}
    for size, size_times in times.items():
        costs[size] = _costs(size_times, action)
    return costs


def _costs(times: Times, action: float) -> RankCosts:
    """Return the medians, for each kind of layer."""
    layers = []
    loss = 0.0
    for _, actions in sorted(times.items()):
        middle: dict[str, float] = defaultdict(float)
        for name, seconds in actions.items():
            middle[name] = median(seconds)
        again = max(0.0, middle["R"] + middle["B after R"] - middle["B"])
        layers.append(LayerCosts(middle["F"], middle["B"], middle["I"], middle["W"], again))
        loss += middle["loss"]
    return RankCosts(tuple(layers), loss, action)


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


def _round(measured: MeasuredRanks, size: int, times: Times) -> None:
    """Add the seconds of the layers' actions to `times`; collective."""
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
                kind = measured.problem.kinds[timer.stage.first]
                timer.actions = times.setdefault(kind, defaultdict(list))
            for _ in range(repeats_in(SECONDS, max(everyone), REPEATS)):
                _turn(timers)
