"""The kernels on numpy arrays of every dtype: full_precision sees halves as float32."""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import upcast, upcast_halves
from mpipipe.nn.kernels.host import full_precision

# `returned` are the results that are activations, and rounded, as is what is `written`; all others
# are sums, statistics or gradients of parameters
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
apply_rope = upcast_halves(full_precision.apply_rope, written=(2,))
embed_backward = upcast_halves(full_precision.embed_backward)
norm = upcast_halves(full_precision.norm, returned=(0,))
dropout = upcast_halves(full_precision.dropout, returned=(0,))
dropout_backward = upcast_halves(full_precision.dropout_backward, returned=(0,))
mean_squared_error = upcast_halves(full_precision.mean_squared_error, returned=(1,))

# these take every dtype, or are given float32 and float64 alone
accumulate = full_precision.accumulate
add_parts = full_precision.add_parts
copy = full_precision.copy
rope_table = full_precision.rope_table
embed = full_precision.embed
softmax_cross_entropy = full_precision.softmax_cross_entropy
running_lse = full_precision.running_lse
running_lse_backward = full_precision.running_lse_backward
adamw = full_precision.adamw
sgd = full_precision.sgd
sums_of_squares = full_precision.sums_of_squares


def scale(x: np.ndarray, factor: float, out: np.ndarray | None = None) -> np.ndarray:
    """As full_precision.scale; the product with a half is rounded, not the factor."""
    if x.dtype.itemsize != 2:
        return full_precision.scale(x, factor, out)
    out = np.empty_like(x) if out is None else out
    copy(full_precision.scale(upcast(x), float(np.float32(factor))), out)
    return out


def norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    gain: np.ndarray,
    centred: bool,
    more: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    """As full_precision.norm_backward; `more` is added to dx when that has been rounded."""
    dx, *parts = _norm_backward(dy, x, scale, gain, centred)
    return (dx if more is None else add(more, dx), *parts)


_norm_backward = upcast_halves(full_precision.norm_backward, returned=(0,))
