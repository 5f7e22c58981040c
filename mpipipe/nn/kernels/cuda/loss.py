"""Losses on a GPU and their gradients, times a factor that is applied before the gradient is rounded."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.embed import check_ids
from mpipipe.nn.kernels.cuda.launch import BLOCK, FOLDER, WORD, check_contiguous, scalar, word

CROSS_ENTROPY, SQUARED_ERROR, MEAN = (FOLDER / f"{name}.cu" for name in ("cross_entropy", "squared_error", "mean"))
THREADS = (32, 64, 128, 256, 512)  # of one row of logits: two blocks at least share a multiprocessor
WORDS = 4  # that a thread fetches at a time
PARTS = 2048  # blocks for a mean squared error


def softmax_cross_entropy(logits, ids, factor: float = 1.0):
    """(mean of -log softmax(logits)[id] over the rows, in float64; factor * its gradient).

    The mean is an array without axes on the device, and NaN where an id is outside.
    """
    check_ids(ids)
    check_contiguous("softmax_cross_entropy", logits, ids)
    rows, vocab = logits.shape
    kind = logits.dtype
    gradient, losses = arrays.empty_like(logits), arrays.empty((rows,), np.dtype(np.float64), "cuda")
    apart = (gradient.data.ptr - logits.data.ptr) % WORD  # rows start anywhere, but alike in both
    facts = {"T": kind, "I": ids.dtype, "V": 1 if apart else WORD // kind.itemsize}
    needed = -(-vocab // (facts["V"] * WORDS))
    threads = next((n for n in THREADS if n >= needed), THREADS[-1])
    args = (logits, ids, gradient, losses, np.int64(vocab), scalar(kind)(factor / rows))
    arrays.cuda_function(CROSS_ENTROPY, "softmax_cross_entropy", **facts)((rows,), (threads,), args)
    return _mean(losses, rows), gradient


def mean_squared_error(output, target, factor: float = 1.0):
    """(mean of (output - target)^2 in float64, as an array without axes on the device; factor * its gradient)."""
    check_contiguous("mean_squared_error", output, target)
    gradient = arrays.empty_like(output)
    facts = {"T": output.dtype, "S": target.dtype, "V": word(output, target, gradient)}
    blocks = min(PARTS, -(-output.size // (facts["V"] * BLOCK * 2)))
    partial = arrays.empty((blocks,), np.dtype(np.float64), "cuda")
    slope = scalar(output.dtype)(2 / output.size * factor)
    args = (output, target, gradient, partial, np.int64(output.size), slope)
    arrays.cuda_function(SQUARED_ERROR, "squared_error", **facts)((blocks,), (BLOCK,), args)
    return _mean(partial, output.size), gradient


def _mean(parts, divisor):
    value = arrays.empty((), np.dtype(np.float64), "cuda")
    args = (parts, value, np.int64(parts.size), np.float64(divisor))
    arrays.cuda_function(MEAN, "mean")((1,), (1024,), args)
    return value
