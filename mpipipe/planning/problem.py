"""The training that is to be planned, and the ranks on which it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays, nn, optim
from mpipipe.comm import Coordinates, Mesh
from mpipipe.nn import Parameter
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.planning.predict import Choice
from mpipipe.planning.search import Space

Optimizer: TypeAlias = "optim.AdamW | optim.SGD"


def declared(layers: Sequence[nn.Layer], first: int = 0) -> dict[str, Parameter]:
    """Return all parameters of layers from `first` on, by names such as 3.norm.weight."""
    parameters = {}
    for place, top in enumerate(layers, first):
        for name, layer in top.walk(str(place)):
            for key, parameter in layer.declared.items():
                parameters[f"{name}.{key}"] = parameter
    return parameters


def layers_with(names: Iterable[str]) -> frozenset[int]:
    """Return the places of the layers that have parameters of these names."""
    return frozenset(int(name.partition(".")[0]) for name in names)


@dataclass(frozen=True)
class PlanningProblem:
    """A training that is to be planned. It needs no ranks.

    layers : of the whole model, unbound; they hold no arrays
    costs : operations of each layer
    trained : parameters that are trained, by name
    batch, ranks, replicas, seq : samples of a step, and the shape of the mesh
    dtype, optimizer : names
    moments : arrays as big as the parameters that the optimizer keeps
    shards : replicas that keep a share of these each; 1 where all keep all
    fixed : fields of a Choice that stay as they are
    memory_limit : bytes that a rank may need
    inputs : shapes of the input of each layer, where they are not all alike
    """

    layers: Sequence[nn.Layer]
    costs: Sequence[float]
    trained: Mapping[str, Parameter]
    batch: int
    ranks: int
    replicas: int
    seq: int
    dtype: str
    optimizer: str
    moments: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    memory_limit: int | None = None
    inputs: Sequence[str] = ()
    shards: int = 1

    @property
    def shape(self) -> Coordinates:
        """Shape of the mesh."""
        return Coordinates(self.ranks, self.replicas, self.seq)

    @property
    def rows(self) -> int:
        """Samples of a step in each replica."""
        return self.batch // self.replicas

    @property
    def wide(self) -> int:
        """Bytes of a number in gradients, moments, and parameters as they are updated."""
        return arrays.accumulator(arrays.dtype(self.dtype)).itemsize

    @cached_property
    def trained_layers(self) -> frozenset[int]:
        """Places of the layers with something to train."""
        return layers_with(self.trained)

    @cached_property
    def space(self) -> Space:
        """The plans to search among; raises where there are none."""
        return Space(self.ranks, len(self.layers), self.rows, self.fixed, self.trained_layers)

    def plan(self, choice: Choice) -> LayerPlan:
        """Return the plan of layers that a choice makes."""
        schedule = choice.build(self.ranks, self.trained_layers)
        return LayerPlan(schedule, choice.ranges, self.rows).with_names(self.layers)

    @cached_property
    def signatures(self) -> tuple[str, ...]:
        """Describe each layer: parts, shapes, what is trained, and how many operations it takes."""
        signatures = []
        for place, (layer, cost) in enumerate(zip(self.layers, self.costs)):
            parts = []
            for name, part in layer.walk(""):
                for key, entry in part.declared.items():
                    trained = ""
                    if f"{place}{name}.{key}" in self.trained:
                        trained = " trained"
                    parts.append(f"{type(part).__name__} {name}.{key} {entry.shape}{trained}")
            if self.inputs:
                parts.append(f"{type(layer).__name__} of {self.inputs[place]}")
            parts.append(f"{cost} operations")
            signatures.append("; ".join(parts))
        return tuple(signatures)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer: those of one kind have the same parts, shapes and operations."""
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(signature, len(numbers)) for signature in self.signatures)

    @cached_property
    def trained_counts(self) -> tuple[int, ...]:
        """Number of trained parameters of each layer."""
        counts = [0] * len(self.layers)
        for name, entry in self.trained.items():
            counts[int(name.partition(".")[0])] += entry.size
        return tuple(counts)

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Bytes of parameters, gradients and the optimizer's state of each layer."""
        sizes = []
        for layer, trained in zip(self.layers, self.trained_counts):
            more = trained * self.wide + self.moment_bytes(trained)
            sizes.append(self.parameter_bytes(parameters_of([layer]), trained) + more)
        return tuple(sizes)

    def gradient_bytes(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Bytes of the gradients of stages, which have layers from a start to a stop."""
        return [self.wide * sum(self.trained_counts[start:stop]) for start, stop in ranges]

    def parameter_bytes(self, count: int, trained: int) -> int:
        """Return the bytes of parameters in a training, with copies in a half dtype."""
        size = count * self.wide - self.elsewhere_bytes(trained)
        narrow = arrays.dtype(self.dtype).itemsize
        if narrow != self.wide:
            size += count * narrow
        return size

    def elsewhere_bytes(self, trained: int) -> int:
        """Return the bytes of originals, besides copies in a half dtype, that other replicas keep.

        Replicas keep a share of the originals each, but for adapters (optim/shards.py).
        """
        if arrays.dtype(self.dtype).itemsize == self.wide:
            return 0
        for layer in self.layers:
            for _, part in layer.walk(""):
                if part.adapters:
                    return 0
        return (trained - self._share(trained)) * self.wide

    def moment_bytes(self, trained: int) -> int:
        """Bytes of the optimizer's state of this number of parameters, on one rank."""
        return self._share(trained) * self.wide * self.moments

    def _share(self, count: int) -> int:
        """Return how many of these numbers one of the replicas that share them keeps."""
        return -(-count // self.shards)


@dataclass(frozen=True)
class MeasuredRanks:
    """The ranks on which a training is measured, and what this one of them runs.

    problem, mesh : what is planned, and on which ranks
    layers : makes the layers of the whole model, bound to this rank's share of samples
    loss_for : makes the loss after a stage, for the samples of a micro-batch
    example : makes inputs and targets: of a number of rows, for a number of micro-batches
    optimizer, scaler : make those of the training
    lr, clip, seed : of the training
    """

    problem: PlanningProblem
    mesh: Mesh
    layers: Callable[[], list[nn.Layer]]
    loss_for: Callable[[nn.Stage, int], Callable[..., object]]
    example: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    optimizer: Callable[[Sequence[nn.Stage], Mesh], Optimizer]
    scaler: Callable[[], optim.LossScaler]
    lr: float
    clip: float
    seed: int
    frozen: Sequence[str] = ()


def parameters_of(layers: Sequence[nn.Layer]) -> int:
    """Count the elements of all arrays that the layers declare."""
    return sum(parameter.size for parameter in declared(layers).values())


def count_once(parameters: Mapping[str, Parameter]) -> int:
    """Count the elements of parameters, those of each tied one once."""
    sizes = {entry.tie or name: entry.size for name, entry in parameters.items()}
    return sum(sizes.values())


def attentions(layers: Sequence[nn.Layer]) -> Iterator[nn.SelfAttention]:
    """Yield the attention layers among these layers and their parts."""
    for top in layers:
        for _, layer in top.walk(""):
            if isinstance(layer, nn.SelfAttention):
                yield layer
