"""The kernels on numpy arrays of every dtype: full_precision sees halves as float32."""

from __future__ import annotations

from functools import partial

from mpipipe.arrays import upcast_halves
from mpipipe.nn.kernels.host import HostArray, full_precision

# These take every dtype, or are given float32 and float64 alone.
from mpipipe.nn.kernels.host.full_precision import (  # noqa: F401  # kernels, too
    accumulate,
    adamw,
    add_parts,
    copy,
    embed,
    rope_table,
    running_lse,
    running_lse_backward,
    sgd,
    softmax_cross_entropy,
    sums_of_squares,
)

# The first result of these is an activation, and rounded.
_rounded = partial(upcast_halves, returned=(0,))
linear = _rounded(full_precision.linear)
linear_backward_input = _rounded(full_precision.linear_backward_input)
add = _rounded(full_precision.add)
gelu = _rounded(full_precision.gelu)
gelu_backward = _rounded(full_precision.gelu_backward)
swiglu = _rounded(full_precision.swiglu)
norm = _rounded(full_precision.norm)
dropout = _rounded(full_precision.dropout)
dropout_backward = _rounded(full_precision.dropout_backward)

# What these return or write is rounded where that is said; the rest are sums, or gradients of
# parameters.
linear_backward_weight = upcast_halves(full_precision.linear_backward_weight)
products = upcast_halves(full_precision.products)
sum_rows = upcast_halves(full_precision.sum_rows)
embed_backward = upcast_halves(full_precision.embed_backward)
swiglu_backward = upcast_halves(full_precision.swiglu_backward, returned=(0, 1))
apply_rope = upcast_halves(full_precision.apply_rope, written=(2,))
mean_squared_error = upcast_halves(full_precision.mean_squared_error, returned=(1,))


def scale(x: HostArray, factor: float, out: HostArray | None = None) -> HostArray:
    """As full_precision.scale; the product with a half is rounded, not the factor."""
    product = _scaled(x, factor)
    if out is None:
        return product
    copy(product, out)
    return out


_scaled = _rounded(full_precision.scale)


def norm_backward(
    dy: HostArray,
    x: HostArray,
    scale: HostArray,
    gain: HostArray,
    centred: bool,
    more: HostArray | None = None,
) -> tuple[HostArray, ...]:
    """As full_precision.norm_backward; `more` is added to dx when that has been rounded."""
    dx, *parts = _norm_backward(dy, x, scale, gain, centred)
    return (dx if more is None else add(more, dx), *parts)


_norm_backward = _rounded(full_precision.norm_backward)
