"""Measures layers: seconds of their actions, bytes that they keep, and the optimizer.

Each rank runs a small pipeline of its own, with one or two layers of each kind of the model, embedding and head among
them, while all other ranks do the same: they share the memory's bandwidth as in a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.arrays import dtype as dtype_of
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.types import Communicator
from mpipipe.pipeline.loss import Loss
from mpipipe.planning import LayerCosts, RankCosts, Sizes
from mpipipe.train.planner.kept import buffers
from mpipipe.train.planner.scene import Scene
from mpipipe.train.planner.stopwatch import METHODS, Stopwatch
from mpipipe.train.progress import Progress

ROUNDS = 3  # in which all sizes of micro-batches take turns, so that all of them see the same machine
SECONDS = 0.2  # in a round, for each size and each way to go backwards
REPEATS = (3, 25)  # at least, at most
ALIKE = 2  # layers of a kind that are measured
UNDER_WAY = 2  # micro-batches, so that what one has saved is not in the cache any more when it is needed


@dataclass
class Measured:
    """What one rank has found.

    Attributes
    ----------
    costs, sizes : for each size of micro-batch
    optimizer, sums : seconds for one parameter
    """

    costs: dict[int, RankCosts]
    sizes: dict[int, Sizes]
    optimizer: float
    sums: float


def measure_layers(scene: Scene) -> Measured:
    """Measure all kinds of layers on this rank; collective over all ranks."""
    group = group_of(scene.mesh.comm)
    alone = group.split(scene.mesh.rank, 0, "plan: a rank by itself")
    picked = _picked(scene.kinds)
    found = Measured({}, {}, 0.0, 0.0)
    optimizers, sums = [], []
    probes = {size: _Probe(scene, group, alone, picked, size) for size in scene.space.sizes}
    for _ in range(ROUNDS):
        for probe in probes.values():
            probe.run()
    for size, probe in probes.items():
        found.costs[size], found.sizes[size] = probe.costs(), probe.sizes()
        optimizers += probe.optimizers
        sums += probe.sums
    found.optimizer, found.sums = median(optimizers), median(sums)
    group.agree("plan: all ranks have measured the layers")
    alone.Free()
    return found


def _picked(kinds: Sequence[int]) -> list[int]:
    """Return the layers to measure: the first ones of each kind, and the last one."""
    return [
        place for place, kind in enumerate(kinds) if list(kinds[:place]).count(kind) < ALIKE or place == len(kinds) - 1
    ]


class _Probe:
    """One size of micro-batch on one rank."""

    def __init__(self, scene: Scene, group: Group, alone: Communicator, picked: list[int], size: int) -> None:
        self.scene, self.group, self.alone, self.picked, self.size = scene, group, alone, picked, size
        self.watch = Stopwatch()
        self.optimizers: list[float] = []
        self.sums: list[float] = []

    def _stage(self) -> nn.Stage:
        scene, layers = self.scene, self.scene.layers()
        trained = scene.tuning.trained(scene.model)
        still = [name for name in scene.tuning.declared(scene.model) if name not in trained]
        places = {str(place): str(number) for number, place in enumerate(self.picked)}
        cut = [(name.partition(".")[0], name.partition(".")[2]) for name in still]
        frozen = [f"{places[place]}.{rest}" for place, rest in cut if place in places]
        picked = [layers[place] for place in self.picked]
        return nn.Stage(picked, scene.config.dtype, scene.config.seed, frozen=frozen)

    def run(self) -> None:
        """Measure whole backwards, and split ones."""
        self._run("gpipe", "FB")
        self._run("zero_bubble_h1", "FIW")

    def costs(self) -> RankCosts:
        """Return what was measured so far."""
        watch, kinds = self.watch, self.scene.kinds
        by_kind: dict[int, list[LayerCosts]] = {}
        for place in self.picked:
            mine = LayerCosts(*(watch.median(place, word) for word in "FBIW"))
            by_kind.setdefault(kinds[place], []).append(mine)
        layers = tuple(_median(by_kind[kind]) for kind in range(len(by_kind)))
        inside = sum(watch.median(place, "F") for place in self.picked)
        return RankCosts(layers, watch.median("loss", "F"), max(0.0, watch.median("stage", "F") - inside))

    def _run(self, name: str, words: str) -> None:
        scene, stage = self.scene, self._stage()
        schedule = schedules.by_name(name, ranks=1, microbatches=UNDER_WAY)
        loss = scene.shard.loss_for(stage, self.size)
        batch = scene.tokens(UNDER_WAY * self.size, UNDER_WAY)
        with Pipeline([stage], schedule, self.alone, loss=loss, replicas=scene.mesh.replicas) as pipeline:
            progress = Progress(scene.config, pipeline, scene.mesh)
            stage.keep_compute()
            _step(
                pipeline, progress, batch, scene.config.clip
            )  # the first one is unlike the others: memory is allocated
            seconds = max(
                self.group.gather(
                    "plan: the seconds of a step", sum(_step(pipeline, progress, batch, scene.config.clip))
                )
            )
            repeats = min(max(REPEATS[0], int(SECONDS / max(seconds, 1e-9))), REPEATS[1])
            self._watch(stage, pipeline)
            self.group.agree("plan: all ranks begin to measure")
            times = [_step(pipeline, progress, batch, scene.config.clip) for _ in range(repeats)]
            self._conclude(stage, times, words)

    def _watch(self, stage: nn.Stage, pipeline: Pipeline) -> None:
        self.watch.watch("stage", stage, {name: METHODS[name] for name in METHODS if hasattr(stage, name)})
        self.watch.watch("loss", pipeline.engine.executor.loss, {"call": "F"})
        for place, layer in zip(self.picked, stage.layers):
            self.watch.watch(place, layer, METHODS)

    def _conclude(self, stage: nn.Stage, times: list[tuple[float, float]], words: str) -> None:
        count = max(1, stage.gradients.flat.size)
        self.optimizers.append(median(seconds for _, seconds in times) / count)
        if self.scene.mesh.replicas.size > 1:
            busy = sum(self.watch.median("stage", word) for word in words) + self.watch.median("loss", "F")
            seconds = median(seconds for seconds, _ in times)
            self.sums.append(max(0.0, seconds - UNDER_WAY * busy) / count)
        else:
            self.sums.append(0.0)

    def sizes(self) -> Sizes:
        """Count what one micro-batch of several keeps, but not what they share, such as parameters and tables."""
        scene, stage = self.scene, self._stage()
        rows, length, dim = scene.message_shape(self.size)
        inputs, targets = scene.tokens(self.size, 1)
        loss = Loss(scene.shard.loss_for(stage, self.size))
        with ExitStack() as stack:
            stack.enter_context(loss.taking_head())
            _, before = stage.forward(inputs)
            output, saved = stage.forward(inputs)
            gradient = loss.call(output, targets, 1.0)[1]
        shared = {*buffers(before), *buffers((stage.parameters.flat, stage.compute.flat, inputs, targets))}
        whole = _new_bytes(saved, shared)
        _, pending = stage.backward_input(gradient, saved)
        split = _new_bytes(pending[::-1], shared)
        split = [0] * (len(whole) - len(split)) + split  # layers below all that is trained have none
        stage.backward_weight(pending)
        kinds = self.scene.kinds
        activation: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for place, first, second in zip(self.picked, whole, split):
            activation[kinds[place]] = max(first, activation.get(kinds[place], 0))
            waiting[kinds[place]] = max(second, waiting.get(kinds[place], 0))
        each = range(len(activation))
        message = rows * length * dim * dtype_of(scene.config.dtype).itemsize
        return Sizes(
            tuple(activation[kind] for kind in each), tuple(waiting[kind] for kind in each), message, gradient.nbytes
        )


def _median(alike: Sequence[LayerCosts]) -> LayerCosts:
    names = ("forward", "backward", "input_grad", "weight_grad")
    return LayerCosts(*(median(getattr(each, name) for each in alike) for name in names))


def _new_bytes(things: Sequence[Any], shared: set[int]) -> list[int]:
    """Return the bytes that each thing holds and neither `shared` nor one before it has."""
    seen, found = set(shared), []
    for thing in things:
        own = buffers(thing)
        found.append(sum(size for key, size in own.items() if key not in seen))
        seen |= set(own)
    return found


def _step(pipeline: Pipeline, progress: Progress, batch: tuple[Any, Any], clip: float) -> tuple[float, float]:
    """Make a step; return the seconds of the pipeline and of clipping and optimizer."""
    pipeline.step(*batch, scale=progress.scaler.scale)
    start = perf_counter()
    optim.scaled_step(progress.optimizer, progress.scaler, clip, lr=progress.optimizer.lr)
    return pipeline.elapsed, perf_counter() - start
