"""Losses on a GPU and their gradients, times a factor that is applied before the gradient is rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import BLOCK, WORD, Call, scalar_type, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.nn.kernels.cuda.checks import check_contiguous, check_ids

CROSS_ENTROPY, SQUARED_ERROR, MEAN = (
    Path(__file__).with_name(f"{name}.cu") for name in ("cross_entropy", "squared_error", "mean")
)
THREADS = (32, 64, 128, 256, 512)  # of one row of logits: two blocks at least share a multiprocessor
WORDS = 4  # that a thread fetches at a time
FLOAT64 = np.dtype(np.float64)
PARTS = 2048  # blocks for a mean squared error


def softmax_cross_entropy(
    logits: DeviceArray, ids: DeviceArray, factor: float = 1.0, out: DeviceArray | None = None
) -> tuple[DeviceArray, DeviceArray]:
    """Return (mean of -log softmax(logits)[id] over the rows, factor * its gradient); NaN where an id is outside."""
    rows = len(logits)
    gradient: DeviceArray = arrays.empty_like(logits) if out is None else out
    losses = arrays.empty((rows,), FLOAT64, "cuda")
    _cross_entropy((logits, ids, gradient), (losses,), (), (scalar_type(logits.dtype)(factor / rows),))
    return _mean(losses, rows), gradient


def _pack_cross_entropy(logits: DeviceArray, ids: DeviceArray, gradient: DeviceArray, _: DeviceArray) -> Call:
    check_ids(ids)
    check_contiguous("softmax_cross_entropy", logits, ids, gradient)
    (rows, vocab), dtype = logits.shape, logits.dtype
    apart = (gradient.data.ptr - logits.data.ptr) % WORD  # rows start anywhere, but alike in both
    constants: dict[str, Any] = {"T": dtype, "I": ids.dtype, "V": 1 if apart else WORD // dtype.itemsize}
    needed = -(-vocab // (constants["V"] * WORDS))
    threads = next((n for n in THREADS if n >= needed), THREADS[-1])
    function = arrays.cuda_function(CROSS_ENTROPY, "softmax_cross_entropy", **constants)
    return Call(function, (rows,), (threads,), (np.int64(vocab),))


def mean_squared_error(
    output: DeviceArray, target: DeviceArray, factor: float = 1.0
) -> tuple[DeviceArray, DeviceArray]:
    """Return (mean of (output - target)^2, factor * its gradient)."""
    gradient = arrays.empty_like(output)
    call = _squared_error.call((output, target), (gradient,))
    partial = arrays.empty(call.grid, FLOAT64, "cuda")
    per_element = scalar_type(output.dtype)(2 / output.size * factor)
    call.launch((output, target, gradient, partial), (per_element,))
    return _mean(partial, output.size), gradient


def _pack_squared_error(output: DeviceArray, target: DeviceArray, gradient: DeviceArray) -> Call:
    check_contiguous("mean_squared_error", output, target)
    constants: dict[str, Any] = {"T": output.dtype, "S": target.dtype, "V": vector_width(output, target, gradient)}
    blocks = min(PARTS, -(-output.size // (constants["V"] * BLOCK * 2)))
    function = arrays.cuda_function(SQUARED_ERROR, "squared_error", **constants)
    return Call(function, (blocks,), (BLOCK,), (np.int64(output.size),))


def _mean(parts: DeviceArray, divisor: int) -> DeviceArray:
    """Return the sum of the parts over `divisor`, an array without axes."""
    value = arrays.empty((), FLOAT64, "cuda")
    _means((parts,), (value,), (divisor,))
    return value


def _pack_mean(parts: DeviceArray, _: DeviceArray, divisor: int) -> Call:
    return Call(arrays.cuda_function(MEAN, "mean"), (1,), (1024,), (np.int64(parts.size), np.float64(divisor)))


_cross_entropy, _squared_error = Packed(_pack_cross_entropy), Packed(_pack_squared_error)
_means = Packed(_pack_mean)
