"""The loss of the last stage: what it returns, checked, with its gradient times the share of the micro-batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import flatten, unflatten
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.nn import HeadCrossEntropy, kernels
from mpipipe.stages import takes_parameter


class Loss:
    """A user's loss function.

    Parameters
    ----------
    function : `function(output, target) -> (value, gradient of the output)`, with a weight as a third value or without.
        A function with a parameter `factor` multiplies the gradient by it before rounding; for others it is multiplied
        afterwards.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.takes_factor = takes_parameter(function, "factor")
        self.with_head = function if isinstance(function, HeadCrossEntropy) else None

    def taking_head(self) -> AbstractContextManager[None]:
        """Within this context the last stage leaves the product of its head to the function, if that is made for it."""
        return nullcontext() if self.with_head is None else self.with_head.taking_over()

    def call(self, output: Tree, target: Tree, factor: float) -> Any:
        """Return what the function returns."""
        return self.function(output, target, factor=factor) if self.takes_factor else self.function(output, target)

    def checked(self, result: Any) -> tuple[Any, Tree, float | None]:
        """Return (value, gradient, weight or None) of a result; raises ArgumentError if it is none.

        Where the weight is 0, there is no value: it is NaN here.
        """
        if type(result) is not tuple or len(result) not in (2, 3):
            raise ArgumentError(
                "a loss returns (value, gradient of the output), or (value, gradient of the output, weight)",
                found=f"a tuple of {len(result)}" if type(result) is tuple else type(result).__name__,
                expected="a tuple of two or three",
            )
        value, gradient, weight = result[0], result[1], None
        if len(result) == 3:
            weight = checked_weight(result[2])
            if weight == 0:
                return math.nan, gradient, weight
        if type(value) is not float:
            if getattr(value, "size", 1) != 1:
                raise ArgumentError(
                    "the value of a loss", found=f"an array of shape {value.shape}", expected="one number"
                )
            if isinstance(value, (np.ndarray, np.generic)):
                value = value.item()
            on_device = arrays.is_device(value)
            if isinstance(value, complex) or (on_device and value.dtype.kind == "c"):
                raise ArgumentError(
                    "the value of a loss is complex",
                    found="a complex number",
                    expected="one real number",
                    remedy="the mean of abs(x) ** 2, or of x.real",
                )
            if on_device:  # looked at when the step has ended
                return value, gradient, weight
        check_finite(value)
        return value, gradient, weight

    def scaled(self, gradient: Tree, factor: float, output: Tree) -> Tree:
        """Return the gradient times a factor; raises ArgumentError if it does not fit the output.

        For the factor 0 the gradient is not looked at.
        """
        if factor == 1 and type(gradient) is type(output) is np.ndarray:  # the common case, on the hot path
            if gradient.shape == output.shape and gradient.dtype == output.dtype and output.dtype.kind == "f":
                return gradient
        outputs, expected = flatten(output)
        leaves, structure = flatten(gradient) if factor else (list(map(_zeros_like, outputs)), expected)
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
            scaled.append(leaf if factor in (0, 1) else kernels.of_array(leaf).scale(leaf, factor))
        return unflatten(scaled, structure)


def checked_weight(weight: Any) -> float:
    """Return the weight of a loss as a float; raises ArgumentError unless it is a finite number of at least 0."""
    if isinstance(weight, (np.ndarray, np.generic)) and weight.ndim == 0:
        weight = weight.item()
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= sys.float_info.max:
        raise ArgumentError(
            "the weight of a loss",
            found=repr(weight) if is_number else type(weight).__name__,
            expected="a finite number of at least 0",
            remedy="return how many things the value is a mean over, such as target.size or float(mask.sum())",
        )
    return float(weight)


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


def _zeros_like(array: Array) -> Array:
    zeros = arrays.empty_like(array)
    arrays.set_zero(zeros)
    return zeros


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
