"""Losses: loss(output, target) -> (value, gradient of the output); the value is a mean over the micro-batch.

For an output on a GPU the value stays there, as an array of float64 without axes, and a target on the host is uploaded.
`factor` multiplies the gradient before it is rounded to the dtype of the output: gradients that float16 would lose need
the scale of the loss there.
"""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.layers.embedding import device_integers


def mean_squared_error(output, target, factor: float = 1.0):
    """Mean of (output - target)^2 over all elements, summed in float64; gradient 2 (output - target) / size.

    Raises ArgumentError if the shapes differ or there are no elements.
    """
    if output.shape != target.shape or output.size == 0:
        raise ArgumentError(
            "mean_squared_error needs a target for each element of the output",
            found=f"output {output.shape}, target {target.shape}",
            expected="equal shapes, not empty",
        )
    if not isinstance(output, np.ndarray) or not isinstance(target, np.ndarray):
        target = _beside(output, target)
    return kernels.of_array(output).mean_squared_error(output, target, factor)


def softmax_cross_entropy(output, target, factor: float = 1.0):
    """Mean of -log softmax(output)[target], in nats, and its gradient (softmax(output) - onehot(target)) / rows.

    Parameters
    ----------
    output : logits (..., vocab), of any floating dtype and any size
    target : integers (...) in 0 ... vocab - 1

    Raises ArgumentError if shapes do not fit or a target on the host is not in that range; one on a GPU that is not
    makes the value NaN.
    """
    if output.ndim == 0 or output.shape[:-1] != target.shape or output.size == 0:
        raise ArgumentError(
            "softmax_cross_entropy needs one target for each row of logits",
            found=f"logits {output.shape}, targets {target.shape}",
            expected="logits (..., vocab) and targets (...), not empty",
        )
    _check_side(output, target)
    device = arrays.device_of(output)
    ids = device_integers(target, output.shape[-1], "softmax_cross_entropy: the target", device).reshape(-1)
    value, gradient = kernels.of_array(output).softmax_cross_entropy(rows(output), ids, factor)
    return value, gradient.reshape(output.shape)


def _beside(output, target):
    """The target of a device output there, in its dtype."""
    _check_side(output, target)
    if arrays.is_device(output) and not arrays.is_device(target):
        return arrays.upload(target.astype(output.dtype))
    return target


def _check_side(output, target):
    if arrays.is_device(target) and not arrays.is_device(output):
        raise ArgumentError(
            "the target of a loss is on a GPU and the output on the host",
            remedy="give targets as numpy arrays, or build the stages with device='cuda'",
        )
