"""The loss of the last stage: what it returns, checked, with its gradient times the weight of the micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import flatten, unflatten
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.nn import HeadCrossEntropy, kernels
from mpipipe.pipeline.signatures import takes_parameter


class Loss:
    """A user's loss function.

    Parameters
    ----------
    function : `function(output, target) -> (value, gradient of the output)`. A function with a parameter `factor`
        multiplies the gradient by it before rounding; for others it is multiplied afterwards.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.takes_factor = takes_parameter(function, "factor")
        self.with_head = function if isinstance(function, HeadCrossEntropy) else None

    def taking_head(self) -> AbstractContextManager[None]:
        """Within this context the last stage leaves the product of its head to the function, if that is made for it."""
        return nullcontext() if self.with_head is None else self.with_head.taking_over()

    def call(self, output: Tree, target: Tree, weight: float) -> Any:
        """Return what the function returns."""
        return self.function(output, target, factor=weight) if self.takes_factor else self.function(output, target)

    def checked(self, result: Any) -> tuple[Any, Tree]:
        """Return (value, gradient) of a result; raises ArgumentError if it is none."""
        if type(result) is not tuple or len(result) != 2:
            raise ArgumentError(
                "a loss returns (value, gradient of the output)", found=type(result).__name__, expected="a tuple of two"
            )
        value, gradient = result
        if type(value) is not float:
            if getattr(value, "size", 1) != 1:
                raise ArgumentError(
                    "the value of a loss", found=f"an array of shape {value.shape}", expected="one number"
                )
            if arrays.is_device(value):  # looked at when the step has ended
                return value, gradient
            if isinstance(value, np.ndarray):
                value = value.item()
        check_finite(value)
        return value, gradient

    def weighted(self, gradient: Tree, weight: float, output: Tree) -> Tree:
        """Return the gradient times the weight; raises ArgumentError if it does not fit the output."""
        weight = 1.0 if self.takes_factor else weight
        if weight == 1 and type(gradient) is type(output) is np.ndarray:  # the common case, on the hot path
            if gradient.shape == output.shape and gradient.dtype == output.dtype and output.dtype.kind == "f":
                return gradient
        leaves, structure = flatten(gradient)
        outputs, expected = flatten(output)
        if structure != expected:
            raise ArgumentError(
                "the gradient of the loss has another structure than the output", found=structure, expected=expected
            )
        scaled: list = []
        for leaf, like in zip(leaves, outputs):
            if not arrays.is_floating(like.dtype):
                scaled.append(None)  # an integer output has no gradient
                continue
            if not _alike(leaf, like):
                raise ArgumentError(
                    "the gradient of the loss does not match the output",
                    found=_described(leaf) if arrays.is_array(leaf) else type(leaf).__name__,
                    expected=_described(like),
                )
            scaled.append(leaf if weight == 1 else kernels.of_array(leaf).scale(leaf, weight))
        return unflatten(scaled, structure)


def check_finite(value: Any) -> None:
    """Raise NonFiniteError for a loss that is infinite or NaN, ArgumentError for what is no number."""
    try:
        finite = math.isfinite(value)
    except (TypeError, ValueError):
        raise ArgumentError("the value of a loss", found=type(value).__name__, expected="one number") from None
    if not finite:
        raise NonFiniteError(
            "the loss is not finite",
            found=value,
            remedy="lower the learning rate, clip gradients, or look at this micro-batch's data",
        )


def _alike(leaf: Array, like: Array) -> bool:
    """Whether both are arrays of one shape and dtype on one kind of device; refuses a masked array."""
    if type(leaf) is not type(like):
        arrays.refuse_mask(leaf)
        if not arrays.is_array(leaf) or arrays.is_device(leaf) != arrays.is_device(like):
            return False
    return leaf.shape == like.shape and leaf.dtype == like.dtype


def _described(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)} on {arrays.device_of(array)}"


def unscaled(tree: Tree, scale: float) -> Tree:
    """Input gradients without the factor that all gradients of the step carry."""
    if tree is None or scale == 1:
        return tree
    leaves, structure = flatten(tree)
    return unflatten([None if x is None else kernels.of_array(x).scale(x, 1 / scale) for x in leaves], structure)
