"""Losses: loss(output, target) -> (value, gradient of the output); the value is a mean over the micro-batch."""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ArgumentError
from mpipipe.nn.blocks import blocks, rows
from mpipipe.nn.embedding import check_integers


def mean_squared_error(output: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean of (output - target)^2 over all elements, summed in float64; gradient 2 (output - target) / size.

    Raises ArgumentError if the shapes differ or there are no elements.
    """
    if output.shape != target.shape or output.size == 0:
        raise ArgumentError(
            "mean_squared_error needs a target for each element of the output",
            found=f"output {output.shape}, target {target.shape}",
            expected="equal shapes, not empty",
        )
    difference = np.empty(output.shape, output.dtype)
    np.subtract(output, target, out=difference, casting="same_kind")
    flat = difference.reshape(-1)
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64)
        total += float(np.dot(wide, wide))
    np.multiply(difference, 2 / flat.size, out=difference)
    return total / flat.size, difference


def softmax_cross_entropy(output: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean of -log softmax(output)[target], in nats, and its gradient (softmax(output) - onehot(target)) / rows.

    Parameters
    ----------
    output : logits (..., vocab), float32 or float64, of any size
    target : integers (...) in 0 ... vocab - 1

    Raises ArgumentError if shapes do not fit or a target is not in that range.
    """
    if output.ndim == 0 or output.shape[:-1] != target.shape or output.size == 0:
        raise ArgumentError(
            "softmax_cross_entropy needs one target for each row of logits",
            found=f"logits {output.shape}, targets {target.shape}",
            expected="logits (..., vocab) and targets (...), not empty",
        )
    check_integers(target, output.shape[-1], "softmax_cross_entropy: the target")
    logits, ids = rows(output), target.reshape(-1)
    gradient = np.empty(logits.shape, logits.dtype)
    total = 0.0
    for at in blocks(*logits.shape):
        total += _cross_entropy_block(logits[at], ids[at], len(logits), gradient[at])
    return total / len(logits), gradient.reshape(output.shape)


def _cross_entropy_block(logits, ids, count, out):
    """Sum of the losses of some rows, in float64; their gradient, divided by `count`, goes to `out`."""
    np.subtract(logits, logits.max(1, keepdims=True), out=out)
    picks = np.arange(len(ids))
    hits = out[picks, ids]
    np.exp(out, out=out)
    sums = np.add.reduce(out, 1, keepdims=True)
    value = float(np.sum(np.log(sums[:, 0], dtype=np.float64) - hits))
    np.multiply(sums, count, out=sums)
    np.divide(out, sums, out=out)
    out[picks, ids] -= 1 / count
    return value
