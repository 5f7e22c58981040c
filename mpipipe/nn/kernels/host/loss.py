"""Losses and their gradients, times a factor that is applied before the gradient is rounded."""

from __future__ import annotations

import numpy as np

from mpipipe.nn.cache_blocks import ELEMENTS, blocks


def mean_squared_error(output: np.ndarray, target: np.ndarray, factor: float = 1.0) -> tuple[float, np.ndarray]:
    """Return (mean of (output - target)^2, summed in float64; factor * its gradient); `target` has any dtype."""
    if target.dtype == output.dtype:
        difference = output - target
    else:
        difference = np.subtract(output, target, out=np.empty(output.shape, output.dtype), casting="same_kind")
    size, flat = difference.size, difference.reshape(-1)
    if size <= ELEMENTS:
        part = flat.astype(np.float64)
        total = float(part.dot(part))
    else:
        total = 0.0
        for at in blocks(size):
            part = flat[at].astype(np.float64)
            total += float(part.dot(part))
    difference *= 2 / size * factor
    return total / size, difference


def softmax_cross_entropy(
    logits: np.ndarray, ids: np.ndarray, factor: float = 1.0, out: np.ndarray | None = None
) -> tuple[float, np.ndarray]:
    """Return (mean of -log softmax(logits)[id] over the rows, summed in float64; factor * its gradient)."""
    gradient = np.empty(logits.shape, logits.dtype) if out is None else out
    total = 0.0
    for at in blocks(*logits.shape):
        total += cross_entropy_block(logits[at], ids[at], len(logits) / factor, gradient[at])
    return total / len(logits), gradient


def cross_entropy_block(logits: np.ndarray, ids: np.ndarray, count: float, out: np.ndarray) -> float:
    """Return the sum of the losses of some rows; out = their gradient over `count`. `out` may be `logits`."""
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
