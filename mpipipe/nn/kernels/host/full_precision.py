"""The kernels on numpy arrays of float32 or float64.

Large arrays are worked on in pieces that stay in a core's cache from the first pass to the last.
"""

from __future__ import annotations

import numpy as np

from mpipipe.nn import random, rope
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.kernels.host.activation import gelu, gelu_backward, swiglu, swiglu_backward
from mpipipe.nn.kernels.host.loss import mean_squared_error, softmax_cross_entropy
from mpipipe.nn.kernels.host.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from mpipipe.nn.kernels.host.optimizer import adamw, sgd, sums_of_squares
from mpipipe.nn.rope_scaling import RopeScaling

__all__ = [
    "accumulate",
    "adamw",
    "add",
    "add_layer_norm",
    "add_parts",
    "add_rms_norm",
    "apply_rope",
    "cast",
    "copy",
    "dropout",
    "dropout_backward",
    "embed",
    "embed_backward",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward_input",
    "linear_backward_weight",
    "mean_squared_error",
    "rms_norm",
    "rms_norm_backward",
    "rope_table",
    "scale",
    "sgd",
    "softmax_cross_entropy",
    "sum_rows",
    "sums_of_squares",
    "swiglu",
    "swiglu_backward",
]

_PIECE = 1 << 17  # elements of one piece of a weight gradient: half a MiB of float32, which stays in cache


# -- products ---------------------------------------------------------------------------------------------------------


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return y = x weight^T + bias."""
    y = np.matmul(x, weight.T)
    if bias is not None:
        np.add(y, bias, out=y)
    return y


def linear_backward_input(dy: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return dx = dy weight."""
    return np.matmul(dy, weight)


def linear_backward_weight(dy: np.ndarray, x: np.ndarray, grad: np.ndarray, add: bool = True) -> None:
    """Grad += dy^T x; without `add` grad = dy^T x.

    A large product is made in pieces of the gradient, each added while it is still in cache. Without `add` the pieces
    are the same, so that the product has the same bits.
    """
    outputs, inputs = grad.shape
    if outputs * inputs <= _PIECE:
        if add:
            np.add(grad, np.matmul(dy.T, x), out=grad)
        else:
            np.matmul(dy.T, x, out=grad)
        return
    step = max(16, _PIECE // inputs)
    piece = np.empty((step, inputs), grad.dtype) if add else None
    for start in range(0, outputs, step):
        part = grad[start : start + step]
        product = np.matmul(dy[:, start : start + step].T, x, out=part if piece is None else piece[: len(part)])
        if add:
            np.add(part, product, out=part)


def sum_rows(dy: np.ndarray, grad: np.ndarray, add: bool = True) -> None:
    """Grad += the sum of the rows of dy; without `add` grad is that sum."""
    if add:
        np.add(grad, np.add.reduce(dy, 0), out=grad)
    else:
        np.add.reduce(dy, 0, out=grad)


def add_parts(parts: np.ndarray, grad: np.ndarray, add: bool = True) -> None:
    """Grad += the sum of the rows of parts; without `add` grad is that sum."""
    total = parts[0] if len(parts) == 1 else np.add.reduce(parts, 0)
    if add:
        np.add(grad, total, out=grad)
    else:
        grad[...] = total


# -- single passes ----------------------------------------------------------------------------------------------------


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x + y."""
    return np.add(x, y)


def accumulate(grad: np.ndarray, part: np.ndarray) -> None:
    """Grad += part."""
    np.add(grad, part, out=grad)


def scale(x: np.ndarray, factor: float, out: np.ndarray | None = None) -> np.ndarray:
    """Return x * factor, in `out` where it is given."""
    return np.multiply(x, factor, out=out)


def cast(source: np.ndarray, target: np.ndarray) -> None:
    """Target = source, rounded to nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = source


def copy(source: np.ndarray, target: np.ndarray) -> None:
    """Target = source, with any strides."""
    target[...] = source


# -- rotary positions -------------------------------------------------------------------------------------------------


def rope_table(
    positions: np.ndarray,
    head_dim: int,
    base: float,
    dtype: np.dtype,
    device: str = "cpu",
    scaling: RopeScaling | None = None,
) -> np.ndarray:
    """Return the factors for `apply_rope`: complex (seq, 1, head_dim / 2)."""
    return rope.rope_table(positions, head_dim, base, dtype, scaling)


def apply_rope(x: np.ndarray, table: np.ndarray, target: np.ndarray, inverse: bool = False) -> None:
    """Target = each pair of neighbours of x turned by its factor, or back by it with `inverse`."""
    factors = table.conj() if inverse else table
    if x.strides[-1] == target.strides[-1] == x.itemsize:
        np.multiply(rope.pairs(x), factors, out=rope.pairs(target))
    else:
        turned = np.multiply(rope.pairs(np.ascontiguousarray(x)), factors)
        target[...] = turned.view(x.dtype)


# -- embedding --------------------------------------------------------------------------------------------------------


def embed(weight: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return row `id` of the table for each id."""
    return np.take(weight, ids, axis=0, mode="clip")


def embed_backward(dy: np.ndarray, ids: np.ndarray, grad: np.ndarray) -> None:
    """Add each row of dy to the row of grad that its id names."""
    if ids.size == 0:
        return
    ids = ids.reshape(-1)
    order = np.argsort(ids, kind="stable")  # equal ids side by side, in the order of their rows
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    grad[ids[starts]] += np.add.reduceat(rows(dy)[order], starts, axis=0)


# -- dropout ----------------------------------------------------------------------------------------------------------


def dropout(
    x: np.ndarray, key: np.ndarray, counter: tuple[int, int, int], threshold: int, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (y, keep): y = x * factor where `keep`, the random bits of (key, counter) reach `threshold`; else 0."""
    keep = random.bits16(key, counter, x.size).reshape(x.shape) >= threshold
    return dropout_backward(x, keep, factor), keep


def dropout_backward(dy: np.ndarray, keep: np.ndarray, factor: float) -> np.ndarray:
    """Return dx = dy * factor where `keep`, else 0."""
    dx = np.multiply(dy, keep)
    return np.multiply(dx, factor, out=dx)
