"""The protocol of a layer: a pair of array functions, whose backward can be split in two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpipipe.errors import ArgumentError
from mpipipe.nn.parameters import Parameter


class Layer(ABC):
    """Arrays in, arrays out. A layer holds parameters, but nothing of any micro-batch.

    A layer is a description until a `Stage` binds it. It says which arrays it needs in `declared` (name -> Parameter)
    and which layers it contains in `children` (name -> Layer). Binding gives it an attribute for each declared name
    (`self.weight`, in the dtype of activations) and one for its gradient (`self.weight_grad`, in that of sums), both
    views of the stage's flat buffers, and `stage` and `name`; then it calls `bound`.

    A layer that computes with the functions of `stage.kernels` alone works in every dtype and on every device.

    Contract: `forward` never writes x, the backward functions never write dy, x or what forward saved. Results may be
    views of arguments. Gradients are added to `*_grad`. An x of integers has no gradient: dx is None. Equal inputs
    give equal bits, and `backward` gives the bits of `backward_input` and `backward_weight` together.
    """

    declared: Mapping[str, Parameter] = MappingProxyType({})
    children: Mapping[str, Layer] = MappingProxyType({})
    stage: Any = None  # the Stage, once bound
    name: str = ""

    @abstractmethod
    def forward(self, x) -> tuple[Any, Any]:
        """Return (y, saved); `saved` is all that the backward of this micro-batch needs."""

    @abstractmethod
    def backward_input(self, dy, saved) -> tuple[Any, Any]:
        """Return (dx, pending); `pending` is all that `backward_weight` needs."""

    def backward_weight(self, pending) -> None:  # noqa: B027 (layers without parameters have nothing to do)
        """Add this micro-batch's part to the gradients of the parameters."""

    def backward(self, dy, saved):
        """Both halves at once; return dx."""
        dx, pending = self.backward_input(dy, saved)
        self.backward_weight(pending)
        return dx

    def bound(self) -> None:  # noqa: B027 (most layers need nothing more)
        """Called once by `bind`, when the arrays are there."""

    def bind(self, stage, name: str) -> None:
        """Become part of `stage` under `name`. Called by Stage."""
        if self.stage is not None:
            raise ArgumentError(
                f"layer {name} ({type(self).__name__}) already belongs to a stage, as {self.name}",
                remedy="make one layer object for each place; Parameter(tie=...) shares values between places",
            )
        self.stage, self.name = stage, name
        for key in self.declared:
            setattr(self, key, stage.compute[f"{name}.{key}"])
            setattr(self, f"{key}_grad", stage.gradients[f"{name}.{key}"])
        self.bound()

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        """This layer and all within it, each with its full name."""
        yield name, self
        for key, child in self.children.items():
            yield from child.walk(f"{name}.{key}")


def check_features(layer: Layer, x, expected: int) -> None:
    """Raise ArgumentError unless the last axis of x has `expected` elements."""
    if x.ndim == 0 or x.shape[-1] != expected:
        raise ArgumentError(
            f"layer {layer.name} ({type(layer).__name__}): the last axis of the input has the wrong size",
            found=f"shape {x.shape}",
            expected=f"(..., {expected})",
            remedy="give each layer the size that the layer before it puts out",
        )


def check_positive(**sizes: int) -> None:
    """Raise ArgumentError unless every named size is an integer of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(
                f"{name} must be a positive integer", found=repr(size), expected="1 or more", remedy=f"set {name}"
            )
