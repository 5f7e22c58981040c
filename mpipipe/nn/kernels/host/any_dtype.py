"""The kernels on numpy arrays of every dtype: those of full_precision, which see half precision as float32."""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import upcast, upcast_halves
from mpipipe.nn.kernels.host import blocks, full_precision
from mpipipe.nn.kernels.host.flat import summed
from mpipipe.nn.kernels.host.full_precision import cross_entropy_block
from mpipipe.nn.kernels.host.running_lse import running_lse as running_lse
from mpipipe.nn.kernels.host.running_lse import running_lse_backward as running_lse_backward

# `returned`: the results that are activations, and rounded; all others are sums, statistics or parameters' gradients
linear = upcast_halves(full_precision.linear, returned=(0,))
linear_backward_input = upcast_halves(full_precision.linear_backward_input, returned=(0,))
linear_backward_weight = upcast_halves(full_precision.linear_backward_weight)
products = upcast_halves(full_precision.products)
sum_rows = upcast_halves(full_precision.sum_rows)
add = upcast_halves(full_precision.add, returned=(0,))
gelu = upcast_halves(full_precision.gelu, returned=(0,))
gelu_backward = upcast_halves(full_precision.gelu_backward, returned=(0,))
swiglu = upcast_halves(full_precision.swiglu, returned=(0,))
swiglu_backward = upcast_halves(full_precision.swiglu_backward, returned=(0, 1))
embed_backward = upcast_halves(full_precision.embed_backward)
dropout = upcast_halves(full_precision.dropout, returned=(0,))
dropout_backward = upcast_halves(full_precision.dropout_backward, returned=(0,))
mean_squared_error = upcast_halves(full_precision.mean_squared_error, returned=(1,))

# these take every dtype, or are given float32 and float64 alone
accumulate = full_precision.accumulate
add_parts = full_precision.add_parts
cast = full_precision.cast
copy = full_precision.copy
rope_table = full_precision.rope_table
embed = full_precision.embed
adamw = full_precision.adamw
sgd = full_precision.sgd
sums_of_squares = full_precision.sums_of_squares


def scale(x: np.ndarray, factor: float, out: np.ndarray | None = None) -> np.ndarray:
    """As full_precision.scale; the product with a half is rounded, not the factor."""
    if x.dtype.itemsize != 2:
        return full_precision.scale(x, factor, out)
    out = np.empty_like(x) if out is None else out
    cast(full_precision.scale(upcast(x), np.float32(factor)), out)
    return out


def rms_norm(
    x: np.ndarray, gain: np.ndarray, eps: float, more: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As full_precision.rms_norm; what is normalised is the sum when it has been rounded."""
    total = x if more is None else add(x, more)
    return (total, *_rms_norm(total, gain, eps)[1:])


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float, more: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As full_precision.layer_norm; what is normalised is the sum when it has been rounded."""
    total = x if more is None else add(x, more)
    return (total, *_layer_norm(total, gain, bias, eps)[1:])


def rms_norm_backward(
    dy: np.ndarray, x: np.ndarray, scale: np.ndarray, gain: np.ndarray, more: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """As full_precision.rms_norm_backward; `more` is added to dx when that has been rounded."""
    dx, *parts = _rms_norm_backward(dy, x, scale, gain)
    return (dx if more is None else add(more, dx), *parts)


def layer_norm_backward(
    dy: np.ndarray, x: np.ndarray, scale: np.ndarray, gain: np.ndarray, more: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """As full_precision.layer_norm_backward; `more` is added to dx when that has been rounded."""
    dx, *parts = _layer_norm_backward(dy, x, scale, gain)
    return (dx if more is None else add(more, dx), *parts)


_rms_norm = upcast_halves(full_precision.rms_norm, returned=(1,))
_layer_norm = upcast_halves(full_precision.layer_norm, returned=(1,))
_rms_norm_backward = upcast_halves(full_precision.rms_norm_backward, returned=(0,))
_layer_norm_backward = upcast_halves(full_precision.layer_norm_backward, returned=(0,))


def apply_rope(x: np.ndarray, table: np.ndarray, target: np.ndarray, inverse: bool = False) -> None:
    """As full_precision.apply_rope."""
    if x.dtype.itemsize != 2:
        full_precision.apply_rope(x, table, target, inverse)
    else:
        turned = np.ascontiguousarray(upcast(x))
        full_precision.apply_rope(turned, table, turned, inverse)
        cast(turned, target)


def softmax_cross_entropy(
    logits: np.ndarray, ids: np.ndarray, factor: float = 1.0, out: np.ndarray | None = None
) -> tuple[float, np.ndarray]:
    """As full_precision.softmax_cross_entropy, upcasting a piece at a time: logits are the largest arrays of all."""
    if logits.dtype.itemsize != 2:
        return full_precision.softmax_cross_entropy(logits, ids, factor, out)
    gradient = np.empty_like(logits) if out is None else out

    def term(rows: slice) -> float:
        part = upcast(logits[rows])
        value = cross_entropy_block(part, ids[rows], len(logits) / factor, part)
        cast(part, gradient[rows])
        return value

    return summed(blocks(*logits.shape), term) / len(logits), gradient
