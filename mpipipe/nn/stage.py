"""A stage: consecutive layers of the model on one rank, with one buffer of parameters and one of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpipipe import arrays
from mpipipe.errors import ArgumentError
from mpipipe.nn import random
from mpipipe.nn.containers import Sequential
from mpipipe.nn.embedding import Embedding
from mpipipe.nn.layer import Layer
from mpipipe.nn.parameters import Flat, decay_runs


@dataclass
class Position:
    """Where the training stands, as far as random layers must know. Whoever runs the stage sets it before each call."""

    step: int = 0
    microbatch: int = 0
    replica: int = 0
    training: bool = True


class Stage:
    """Layers, bound to flat buffers.

    Parameters
    ----------
    layers : sequence of Layer, none of them bound yet
    dtype : "float32" or "float64", of all parameters, gradients and floating inputs
    seed : initial values are drawn for (seed, parameter name or tie key) in float64 and then cast, so they depend
        neither on how the model is cut into stages nor on dtype
    device : "cpu"
    first : index of layers[0] in the whole model; a parameter is named like "3.weight" or "3.layer.gain"

    Attributes
    ----------
    parameters, gradients : mappings name -> array, with `.flat`; same names, same offsets
    position : Position, read by random layers
    poll : function without arguments or None, called after each layer (to keep messages moving)
    ties : tie key -> names of the parameters on this stage that carry it
    tied_copies : names of parameters here that are counted elsewhere (set by the pipeline)
    runs : (start, stop, decay) runs of the flat buffers
    index : logical stage number, set by the pipeline
    """

    def __init__(self, layers: Sequence[Layer], dtype="float32", seed: int = 0, device: str = "cpu", first: int = 0):
        self.device = arrays.check_device(device)
        self.dtype = _check_dtype(dtype)
        self.layers = tuple(layers)
        self.first = first
        self.seed = seed
        self.position = Position()
        self.poll: Callable[[], object] | None = None
        self.index: int | None = None
        self.tied_copies: set[str] = set()
        self.ties: dict[str, list[str]] = {}
        self._bind()

    def _bind(self) -> None:
        for place, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise ArgumentError(
                    f"layers[{place}] is not a layer", found=type(layer).__name__, expected="an instance of nn.Layer"
                )
        named = [pair for i, layer in enumerate(self.layers) for pair in layer.walk(str(self.first + i))]
        declared = {f"{name}.{key}": p for name, layer in named for key, p in layer.declared.items()}
        shapes = {name: p.shape for name, p in declared.items()}
        self.parameters = Flat(shapes, self.dtype)
        self.gradients = Flat(shapes, self.dtype)
        for name, parameter in declared.items():
            generator = random.initial(self.seed, parameter.tie or name)
            self.parameters[name][...] = parameter.draw(generator, parameter.shape)
            if parameter.tie is not None:
                self.ties.setdefault(parameter.tie, []).append(name)
        decays = {name: p.decay for name, p in declared.items()}
        self.runs = decay_runs(self.parameters.offsets, decays, self.parameters.flat.size)
        for name, layer in named:
            layer.bind(self, name)
        self._chain = Sequential(self.layers)
        self._chain.stage = self

    def forward(self, x):
        """Return (y, saved) for one micro-batch; x has the dtype of the stage, or integers for an Embedding."""
        if getattr(x, "dtype", None) != self.dtype:
            self._check_input(x)
        return self._chain.forward(x)

    def backward_input(self, dy, saved):
        """Return (dx, pending)."""
        return self._chain.backward_input(dy, saved)

    def backward_weight(self, pending) -> None:
        """Add to the gradients."""
        self._chain.backward_weight(pending)

    def backward(self, dy, saved):
        """Both; return dx."""
        return self._chain.backward(dy, saved)

    def _takes_integers(self) -> bool:
        """Whether the first layer is an Embedding, or one of the user's own, of which nothing is known."""
        first = _first_leaf(self.layers[0]) if self.layers else None
        return isinstance(first, Embedding) or not type(first).__module__.startswith("mpipipe.nn.")

    def _check_input(self, x) -> None:
        arrays.namespace(x)
        if x.dtype.kind not in "iu" or not self._takes_integers():
            raise ArgumentError(
                "the input of a stage has the wrong dtype",
                stage=self.index,
                found=str(x.dtype),
                expected=f"{self.dtype}, or integers for an Embedding",
                remedy=f"convert it with astype({str(self.dtype)!r}) or build the stage with dtype={str(x.dtype)!r}",
            )


def _first_leaf(layer: Layer) -> Layer:
    while layer.children:
        layer = next(iter(layer.children.values()))
    return layer


def _check_dtype(name) -> np.dtype:
    kind = arrays.dtype(name)
    if kind not in (np.float32, np.float64):
        raise ArgumentError(
            "a stage on the host computes in float32 or float64",
            found=str(kind),
            expected="'float32' or 'float64'",
            remedy="pass one of them as dtype",
        )
    return kind
