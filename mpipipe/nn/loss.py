"""Losses: loss(output, target) -> (value, gradient of the output); the value is a mean over the micro-batch.

That mean is over all entries of the target. The losses say so by `mean_over_entries`, and a pipeline weighs each
micro-batch by its entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.checks import checked_ids

F = TypeVar("F", bound=Callable[..., Any])


def _over_entries(loss: F) -> F:
    """Mark a loss whose value is a mean over all entries of the target."""
    vars(loss)["mean_over_entries"] = True
    return loss


@_over_entries
def mean_squared_error(output: Array, target: Array, factor: float = 1.0) -> tuple[Any, Array]:
    """Return the mean of abs(output - target)**2 over all elements, and its gradient.

    Parameters
    ----------
    output : array
        Of any shape and a floating or complex dtype, on the host or a GPU.
    target : array
        Of the same shape. For an output on a GPU it may be on the host: it is uploaded.
    factor : float
        Multiplies the gradient before it is rounded: float16 loses small gradients that do not carry a scale.

    Returns
    -------
    value : float, or cupy.ndarray without axes
        The mean, summed in float64. It stays on the GPU where the output is there.
    gradient : array
        `factor` * 2 (output - target) / size, of the shape and dtype of `output`: for complex numbers dRe + i dIm.

    Raises
    ------
    ArgumentError
        The shapes differ, there are no elements, or only the target is on a GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> nn.mean_squared_error(np.array([1.0, 2.0]), np.array([0.0, 2.0]))
    (0.5, array([1., 0.]))
    """
    if output.shape != target.shape or output.size == 0:
        raise ArgumentError(
            "mean_squared_error needs a target for each element of the output",
            found=f"output {output.shape}, target {target.shape}",
            expected="equal shapes, not empty",
        )
    if not isinstance(output, np.ndarray) or not isinstance(target, np.ndarray):
        target = _beside(output, target)
    if output.dtype.kind == "c":  # twice as many squares, of real numbers
        target = target if target.dtype == output.dtype else target.astype(output.dtype)
        parts = arrays.as_reals(output), arrays.as_reals(target)
        value, gradient = kernels.of_array(output).mean_squared_error(*parts, 2 * factor)
        value = 2 * value if type(value) is float else kernels.of_array(value).scale(value, 2.0)
        return value, gradient.view(output.dtype).reshape(output.shape)
    return kernels.of_array(output).mean_squared_error(output, target, factor)


@_over_entries
def softmax_cross_entropy(output: Array, target: Array, factor: float = 1.0) -> tuple[Any, Array]:
    """Return the mean of -log softmax(output)[target] over all rows, in nats, and its gradient.

    Parameters
    ----------
    output : array
        Logits (..., vocab), of any size and a floating dtype, on the host or a GPU.
    target : array of integers
        (...) in 0 ... vocab - 1. For an output on a GPU it may be on the host: it is uploaded.
    factor : float
        Multiplies the gradient before it is rounded: float16 loses small gradients that do not carry a scale.

    Returns
    -------
    value : float, or cupy.ndarray without axes
        The mean, summed in float64. It stays on the GPU where the output is there, and is NaN if a target that was
        there is out of range.
    gradient : array
        `factor` * (softmax(output) - onehot(target)) / rows, of the shape and dtype of `output`.

    Raises
    ------
    ArgumentError
        The shapes do not fit, there are no elements, a target on the host is out of range, or only the target is on a
        GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> value, gradient = nn.softmax_cross_entropy(np.zeros((1, 4)), np.array([2]))
    >>> bool(np.isclose(value, np.log(4))), gradient
    (True, array([[ 0.25,  0.25, -0.75,  0.25]]))
    """
    if output.ndim == 0 or output.shape[:-1] != target.shape or output.size == 0:
        raise ArgumentError(
            "softmax_cross_entropy needs one target for each row of logits",
            found=f"logits {output.shape}, targets {target.shape}",
            expected="logits (..., vocab) and targets (...), not empty",
        )
    _check_side(output, target)
    device = arrays.device_of(output)
    ids = checked_ids(target, output.shape[-1], "softmax_cross_entropy: the target", device).reshape(-1)
    value, gradient = kernels.of_array(output).softmax_cross_entropy(rows(output), ids, factor)
    return value, gradient.reshape(output.shape)


def _beside(output: Array, target: Array) -> Array:
    """Return the target on the device of the output; in its dtype where it is uploaded."""
    _check_side(output, target)
    if arrays.is_device(output) and not arrays.is_device(target):
        return arrays.upload(target.astype(output.dtype))
    return target


def _check_side(output: Array, target: Array) -> None:
    if arrays.is_device(target) and not arrays.is_device(output):
        raise ArgumentError(
            "the target of a loss is on a GPU and the output on the host",
            remedy="give targets as numpy arrays, or build the stages with device='cuda'",
        )
