"""The kernels on numpy arrays: those of host_wide, which halves pass through as float32 and are rounded once."""

from __future__ import annotations

from functools import wraps

import numpy as np

from mpipipe import arrays
from mpipipe.nn.cache_blocks import blocks
from mpipipe.nn.kernels.host import full_precision
from mpipipe.nn.kernels.host.loss import cross_entropy_block


def _widened(function, *rounded: int):
    """`function`, taking halves as well.

    Where its first argument is of a half dtype, every half among the arguments is upcast to float32 for the call,
    and the results numbered in `rounded` get the dtype of the first argument. What is too large for float16 becomes
    infinite without a warning: scaling of the loss looks for it.
    """

    @wraps(function)
    def run(first, *others):
        kind = first.dtype
        if kind.itemsize != 2:
            return function(first, *others)
        with np.errstate(over="ignore", invalid="ignore"):
            results = function(*map(_wide, (first, *others)))
            if not isinstance(results, tuple):
                return results.astype(kind) if rounded else results
            return tuple(x.astype(kind) if i in rounded else x for i, x in enumerate(results))

    return run


def _wide(x):
    """An array of halves as float32; anything else as it is."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) and arrays.is_half(x.dtype) else x


linear = _widened(full_precision.linear, 0)
linear_backward_input = _widened(full_precision.linear_backward_input, 0)
linear_backward_weight = _widened(full_precision.linear_backward_weight)
sum_rows = _widened(full_precision.sum_rows)
add = _widened(full_precision.add, 0)
rms_norm = _widened(full_precision.rms_norm, 0)
rms_norm_backward = _widened(full_precision.rms_norm_backward, 0)
layer_norm = _widened(full_precision.layer_norm, 0)
layer_norm_backward = _widened(full_precision.layer_norm_backward, 0)
gelu = _widened(full_precision.gelu, 0)
gelu_backward = _widened(full_precision.gelu_backward, 0)
swiglu = _widened(full_precision.swiglu, 0)
swiglu_backward = _widened(full_precision.swiglu_backward, 0, 1)
embed_backward = _widened(full_precision.embed_backward)
dropout = _widened(full_precision.dropout, 0)
dropout_backward = _widened(full_precision.dropout_backward, 0)
mean_squared_error = _widened(full_precision.mean_squared_error, 1)

# these take every dtype, or see none but float32 and float64
accumulate = full_precision.accumulate
cast = full_precision.cast
copy = full_precision.copy
rope_table = full_precision.rope_table
embed = full_precision.embed
adamw = full_precision.adamw
sgd = full_precision.sgd
sums_of_squares = full_precision.sums_of_squares


def scale(x, factor: float, out=None):
    """As full_precision.scale; the product with a half is rounded, not the factor."""
    if x.dtype.itemsize != 2:
        return full_precision.scale(x, factor, out)
    out = np.empty_like(x) if out is None else out
    cast(full_precision.scale(_wide(x), np.float32(factor)), out)
    return out


def apply_rope(x, table, target, inverse: bool = False):
    """As full_precision.apply_rope."""
    if x.dtype.itemsize != 2:
        full_precision.apply_rope(x, table, target, inverse)
    else:
        turned = np.ascontiguousarray(_wide(x))
        full_precision.apply_rope(turned, table, turned, inverse)
        cast(turned, target)


def softmax_cross_entropy(logits, ids, factor: float = 1.0):
    """As full_precision.softmax_cross_entropy, widening a piece at a time: logits are the largest arrays of all."""
    if logits.dtype.itemsize != 2:
        return full_precision.softmax_cross_entropy(logits, ids, factor)
    gradient = np.empty_like(logits)
    total = 0.0
    for at in blocks(*logits.shape):
        part = _wide(logits[at])
        total += cross_entropy_block(part, ids[at], len(logits) / factor, part)
        cast(part, gradient[at])
    return total / len(logits), gradient
