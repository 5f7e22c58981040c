"""What a pipeline asks of a stage, and the adapter that gives any stage what only some have.

A user's stage is an object with `forward` and `backward`. An `nn.Stage` has more: parameters, ties, a device, layers
that ask for their position and that let messages advance between them. The pipeline sees `StageAdapter` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position


class Stage(Protocol):
    """A pair of array functions. It may keep x until its backward; it holds nothing else of a micro-batch."""

    def forward(self, x: Tree) -> tuple[Tree, Any]:
        """Return (output, whatever backward needs)."""

    def backward(self, dy: Tree, saved: Any) -> Tree:
        """Add to the gradients of the parameters; return the gradient of x."""


@runtime_checkable
class SplitStage(Protocol):
    """A stage for schedules that split the backward."""

    def forward(self, x: Tree) -> tuple[Tree, Any]:
        """Return (output, whatever backward needs)."""

    def backward_input(self, dy: Tree, saved: Any) -> tuple[Tree, Any]:
        """Return (gradient of x, whatever backward_weight needs)."""

    def backward_weight(self, pending: Any) -> None:
        """Add to the gradients of the parameters."""


class StageAdapter:
    """A stage of any kind, as the pipeline sees it.

    Attributes
    ----------
    forward : function (x, Position) -> (output, saved)
    backward, backward_input, backward_weight : those of the stage; None where it has none
    gradients : one-dimensional contiguous array of all gradients, or None
    declares_gradients : whether the stage says what its gradients are, or that it has none
    device : "cpu" or "cuda", with or without a number
    gpu : number of its GPU, None on the host and where the stage does not say
    model : the nn.Stage, None for a stage of the user's own
    name : of its type, for errors
    """

    def __init__(self, given: Any):
        self.name = type(given).__name__
        self.model: nn.Stage | None = given if isinstance(given, nn.Stage) else None
        self.forward: Callable[[Tree, Position], Any] = (
            given.forward if self.model is not None else _without_position(given)
        )
        self.backward, self.backward_input, self.backward_weight = (
            getattr(given, name, None) for name in ("backward", "backward_input", "backward_weight")
        )
        self.device = str(getattr(given, "device", "cpu"))
        self.gpu: int | None = getattr(given, "gpu", None)
        self.declares_gradients = hasattr(given, "gradients")
        self._given = given

    @property
    def gradients(self) -> Array | None:
        holder = getattr(self._given, "gradients", None)  # asked each time: a stage may exchange its buffer
        return None if holder is None else holder.flat

    def parameter_facts(self) -> tuple[str, np.ndarray | None]:
        """Return (names, shapes and dtypes; values on the host) as far as known: what replicas must have in common."""
        if self.model is not None:
            parameters, dtype = self.model.parameters, self.model.dtype
            lines = [f"{name} {dtype} {array.dtype} {array.shape}" for name, array in parameters.items()]
            return "".join(lines), arrays.download(parameters.flat)
        gradients = self.gradients
        return ("" if gradients is None else f"{gradients.dtype} {gradients.shape}"), None

    def attach(self, number: int, poll: Callable[[], object]) -> None:
        """Tell the stage its logical number, and what its layers call so that messages advance."""
        if self.model is not None:
            self.model.index, self.model.poll = number, poll

    def begin_call(self) -> None:
        """Make the stage compute with its parameters as they are now."""
        if self.model is not None:
            self.model.refresh()

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        gradients = self.gradients
        if gradients is not None:
            arrays.set_zero(gradients)

    def check(self, splits_backward: bool, has_replicas: bool) -> None:
        """Raise ArgumentError where the stage lacks what the schedule or the replicas need."""
        needed = ["forward", "backward_input", "backward_weight"] if splits_backward else ["forward", "backward"]
        missing = [name for name in needed if not callable(getattr(self._given, name, None))]
        if missing:
            raise ArgumentError(
                "a stage lacks methods that the schedule needs",
                found=f"{self.name} without {', '.join(missing)}",
                expected=", ".join(needed),
            )
        holder = getattr(self._given, "gradients", None)
        if holder is not None and not _is_flat(getattr(holder, "flat", None)):
            raise ArgumentError(
                "the gradients of a stage",
                found=f"{type(holder).__name__} without a one-dimensional contiguous array `flat`",
                expected="an object with `flat`, or None for a stage without parameters",
            )
        if has_replicas and not self.declares_gradients:
            raise ArgumentError(
                "a stage whose gradients cannot be summed over the replicas",
                found=f"{self.name} without the attribute `gradients`",
                expected="an object with one contiguous array `flat` of all gradients, or None where there are none",
            )


def _without_position(given: Any) -> Callable[[Tree, Position], Any]:
    forward = getattr(given, "forward", None)
    return lambda x, _position: forward(x)  # type: ignore[misc]  # `check` has seen that it can be called


def _is_flat(flat: Any) -> bool:
    return arrays.is_array(flat) and flat.ndim == 1 and flat.flags.c_contiguous
