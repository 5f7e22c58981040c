"""Measures the actions of some layers on one rank, for one size of micro-batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from mpipipe import nn, optim, schedules
from mpipipe.arrays import Branches, Tree, mapped
from mpipipe.arrays import dtype as dtype_of
from mpipipe.job import Communicator, group_of
from mpipipe.pipeline import Pipeline
from mpipipe.planning.memory import process_bytes
from mpipipe.planning.problem import MeasuredRanks, declared
from mpipipe.planning.profile import LayerCosts, RankCosts, Sizes
from mpipipe.planning.step_memory import layer_bytes

Step: TypeAlias = "Callable[[], float]"  # returns the seconds of the pipeline

SECONDS = 0.6  # of a round
REPEATS = (3, 25)  # of a step in a round: at least, at most
UNDER_WAY = 2  # micro-batches, so that what one has saved is not in the cache any more when it is needed
# how to go backwards: in one go, in one go after the forward was run again, in two
WAYS = {"whole": ("gpipe", False), "again": ("gpipe", True), "split": ("zero_bubble_h1", False)}


class Probe:
    """Small pipelines of one rank, by which it measures some layers for one size of micro-batch.

    `solo` is a communicator of this rank alone. `optimizers` and `sums` are measured seconds for one parameter: of
    clipping and optimizer, and of the sum over replicas.
    """

    def __init__(self, measured: MeasuredRanks, solo: Communicator, picked: Sequence[int], size: int) -> None:
        self.measured, self.group, self.solo = measured, group_of(measured.mesh.comm), solo
        self.picked, self.size = picked, size
        self.bridged = self._bridged()
        self.at = [number + sum(map(bool, self.bridged[: number + 1])) for number in range(len(picked))]  # in the stage
        self.watches = {way: Stopwatch() for way in WAYS}
        self.optimizers: list[float] = []
        self.sums: list[float] = []
        self._parameters = 1

    def run(self) -> None:
        """Let the ways to go backwards take turns, so that all of them see the same machine; collective."""
        with ExitStack() as stack:
            steps = {way: stack.enter_context(self._pipeline(way, self.measured.mesh.replicas)) for way in WAYS}
            repeats = self._repeats(steps.values())
            self.group.agree("plan: all ranks begin to measure")
            taken = []
            for _ in range(repeats):
                taken.append(steps["whole"]())
                steps["again"]()
                steps["split"]()
        self.sums.append(self._sum(median(taken)))

    def costs(self) -> RankCosts:
        """Return what was measured so far."""
        kinds, whole, split = self.measured.problem.kinds, self.watches["whole"], self.watches["split"]
        by_kind: dict[int, list[LayerCosts]] = {}
        for place in self.picked:
            first, second = split.median(place, "I"), split.median(place, "W")
            once = whole.median(place, "F"), whole.median(place, "B")
            again = max(0.0, self._again(place) - sum(once))
            by_kind.setdefault(kinds[place], []).append(LayerCosts(*once, first, second, again))
        names = ("forward", "backward", "input_grad", "weight_grad", "again")
        layers = tuple(
            LayerCosts(*(median(getattr(each, name) for each in by_kind[kind]) for name in names))
            for kind in range(len(by_kind))
        )
        return RankCosts(layers, whole.median("loss", "F"), max(0.0, whole.median_beyond("stage", self.picked, "F")))

    def _again(self, place: int) -> float:
        """Return the seconds of a layer's forward, of the same again, and of its backward."""
        watch = self.watches["again"]
        calls = watch.seconds[place, "F"]  # of a step: all forwards, and then all of them again
        halves = ([seconds for k, seconds in enumerate(calls) if k // UNDER_WAY % 2 == half] for half in (0, 1))
        return sum(map(median, halves)) + watch.median(place, "B")

    def _sum(self, seconds: float) -> float:
        """Return what a step lasts longer than its actions, for one parameter: the sum over replicas."""
        if self.measured.mesh.replicas.size == 1:
            return 0.0
        watch = self.watches["whole"]
        busy = watch.median("stage", "F") + watch.median("stage", "B") + watch.median("loss", "F")
        return max(0.0, seconds - UNDER_WAY * busy) / self._parameters

    @contextmanager
    def _pipeline(self, way: str, replicas: Communicator | None) -> Iterator[Step]:
        """A pipeline of this rank by itself, whose first step is made: memory is allocated. Its layers are timed."""
        measured, stage = self.measured, self._stage()
        self._parameters = max(1, stage.gradients.flat.size)
        name, recompute = WAYS[way]
        schedule = schedules.by_name(name, ranks=1, microbatches=UNDER_WAY)
        loss = measured.loss_for(stage, self.size)
        inputs, targets = measured.example(UNDER_WAY * self.size, UNDER_WAY)
        batch = inputs.main if isinstance(inputs, Branches) else inputs, targets  # bridges put in what has names
        with Pipeline([stage], schedule, self.solo, loss, recompute, replicas) as pipeline:
            optimizer, scaler = measured.optimizer(pipeline, None), measured.scaler()
            stage.optimizer_writes_compute()

            def step() -> float:
                pipeline.step(*batch, scale=scaler.scale)
                start = perf_counter()
                optim.scaled_step(optimizer, scaler, measured.clip, lr=optimizer.lr)
                self.optimizers.append((perf_counter() - start) / self._parameters)
                return pipeline.elapsed

            step()
            self.optimizers.pop()
            watch = self.watches[way]
            watch.watch("stage", stage, METHODS)
            watch.watch("loss", pipeline.engine.executor.loss, {"call": "F"})
            for place, at in zip(self.picked, self.at):
                watch.watch(place, stage.layers[at], METHODS)
            yield step

    def _repeats(self, steps: Iterable[Step]) -> int:
        seconds = max(self.group.gather("plan: the seconds of steps", sum(step() for step in steps)))
        return min(max(REPEATS[0], int(SECONDS / max(seconds, 1e-9))), REPEATS[1])

    def _stage(self) -> nn.Stage:
        problem, layers = self.measured.problem, self.measured.layers()
        still = [name for name in declared(problem.layers) if name not in problem.trained]
        places = {str(place): str(at) for place, at in zip(self.picked, self.at)}
        cut = [(name.partition(".")[0], name.partition(".")[2]) for name in still]
        frozen = [f"{places[place]}.{rest}" for place, rest in cut if place in places]
        chosen: list[nn.Layer] = []
        for place, needs in zip(self.picked, self.bridged):
            if needs:
                chosen.append(Bridge(self.measured.inputs[place], self.size, needs))
            chosen.append(layers[place])
        unclaimed = nn.names_of(chosen)[2]
        if unclaimed:
            chosen.append(Taker(unclaimed))
        return nn.Stage(chosen, problem.dtype, self.measured.seed, frozen=frozen)

    def _bridged(self) -> list[set[str]]:
        """Return for each picked layer what must be put in before it: "" for its input, and names that it takes."""
        inputs, known, found = self.measured.inputs, set[str](), []
        for place in self.picked:
            takes, gives, _ = nn.names_of([self.measured.problem.layers[place]])
            needs = {*takes} - known
            found.append(needs | {""} if needs or (inputs and place - 1 not in (-1, *self.picked)) else needs)
            known |= {*takes, *gives}
        return found

    def sizes(self) -> Sizes:
        """Count what one micro-batch keeps, but not what several share, such as parameters and tables."""
        measured, problem = self.measured, self.measured.problem
        example = measured.example(self.size, 1)
        found, _ = layer_bytes(
            problem, measured.layers(), lambda stage: measured.loss_for(stage, self.size), example, measured.frozen
        )
        alike = [
            [each for each, kind in zip(found, problem.kinds) if kind == one] for one in range(max(problem.kinds) + 1)
        ]
        actions = ((each.forward - each.saved, each.backward, each.input_grad, each.weight_grad) for each in found)
        return Sizes(
            tuple(max(round(each.saved + each.keeps_input) for each in kind) for kind in alike),
            tuple(max(round(each.pending + each.pends_input) for each in kind) for kind in alike),
            math.prod(measured.message_shape(self.size)) * dtype_of(problem.dtype).itemsize,
            round(found[-1].loss),
            max(0, round(max(map(max, actions)))),
        )


class Bridge(nn.Layer):
    """Stands for layers that are left out: it returns the input of the next one, whatever comes, and gives names."""

    def __init__(self, like: Tree, rows: int, names: Collection[str]) -> None:
        output = mapped(lambda leaf: np.repeat(leaf, rows, axis=0), like)
        self.output, self.values = (output.main, output.skips) if isinstance(output, Branches) else (output, {})
        self.gives = tuple(name for name in self.values if name in names)

    def forward(self, x: Any) -> tuple[Any, Any]:
        for name in self.gives:
            self.stage.give(name, self.values[name])
        return self.output, x

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        return mapped(np.zeros_like, saved), None


class Taker(nn.Layer):
    """The identity, which takes what layers that are left out would take."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.takes = names

    def forward(self, x: Any) -> tuple[Any, Any]:
        return x, None

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        return dy, None


# -- Times the calls of layers inside a stage that runs ---------------------------------------------------------------


# how containers call layers; several are the same action
METHODS = {"forward": "F", "_forward_unadded": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


class Stopwatch:
    """Notes how long methods of objects take; calls inside such a call of the same object do not count."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Hashable, str], list[float]] = defaultdict(list)

    def watch(self, name: Hashable, thing: Any, methods: dict[str, str]) -> None:
        """Time these methods of `thing` from now on, under `name` and the word that each has in `methods`."""
        inside = [False]
        for method, word in methods.items():
            if hasattr(thing, method):
                setattr(thing, method, self._timed(getattr(thing, method), (name, word), inside))

    def _timed(self, call: Callable[..., Any], key: tuple[Hashable, str], inside: list[bool]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if inside[0]:
                return call(*arguments, **named)
            inside[0] = True
            start = perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[key].append(perf_counter() - start)
                inside[0] = False

        return timed

    def median(self, name: Hashable, word: str) -> float:
        """Return the median seconds of a call; 0 where there was none."""
        found = self.seconds.get((name, word))
        return median(found) if found else 0.0

    def median_beyond(self, outer: Hashable, parts: Iterable[Hashable], word: str) -> float:
        """Return the median seconds by which a call of `outer` lasts longer than its own calls of the parts.

        A delay by another process is in the call and in its part, and does not count. The median of all calls less
        the medians of the parts would count it: a long call meets a delay more often than each of its parts.
        """
        times = [seconds for part in parts if (seconds := self.seconds.get((part, word)))]
        beyond = [whole - sum(inside) for whole, *inside in zip(self.seconds.get((outer, word), ()), *times)]
        return median(beyond) if beyond else 0.0


# -- Measures layers: seconds of their actions, bytes that they keep, and the optimizer -------------------------------
#
# Each rank runs small pipelines of its own, with one or two layers of each kind of the model, embedding and head among
# them, while all other ranks do the same: they share the memory's bandwidth as in a training.


ROUNDS = 3  # in which all sizes of micro-batches take turns, so that all of them see the same machine
ALIKE = 2  # layers of a kind that are measured


@dataclass
class MeasuredLayers:
    """What one rank has measured: costs and sizes for each size of micro-batch, seconds for one parameter.

    `process` are the bytes of a process that trains, without arrays.
    """

    costs: dict[int, RankCosts]
    sizes: dict[int, Sizes]
    process: int
    optimizer: float
    sums: float


def measure_layers(measured: MeasuredRanks) -> MeasuredLayers:
    """Measure all kinds of layers on this rank; collective over all ranks."""
    group = group_of(measured.mesh.comm)
    solo = group.split(measured.mesh.rank, 0, "plan: a rank by itself")
    probes = {
        size: Probe(measured, solo, _picked(measured.problem.kinds), size) for size in measured.problem.space.sizes
    }
    sizes, process = {}, 0
    for size, probe in probes.items():
        with group.raise_together("plan: the bytes of the layers"):  # see `tracing`
            sizes[size] = probe.sizes()
        # A training has one size, and libraries keep something for each.
        process = process or process_bytes()
    for _ in range(ROUNDS):
        for probe in probes.values():
            probe.run()
    found = MeasuredLayers(
        costs={size: probe.costs() for size, probe in probes.items()},
        sizes=sizes,
        process=process,
        optimizer=median(seconds for probe in probes.values() for seconds in probe.optimizers),
        sums=median(seconds for probe in probes.values() for seconds in probe.sums),
    )
    group.agree("plan: all ranks have measured the layers")
    solo.Free()
    return found


def _picked(kinds: Sequence[int]) -> list[int]:
    """Return the layers to measure: the first ones of each kind, and the last one."""
    return [
        place for place, kind in enumerate(kinds) if list(kinds[:place]).count(kind) < ALIKE or place == len(kinds) - 1
    ]
