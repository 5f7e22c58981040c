"""The kernels on numpy arrays of float32 or float64, piece by piece where these are large."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpipipe.arrays import float32_like, round_into, upcast
from mpipipe.nn.kernels.host import ELEMENTS, HostArray, blocks, elementwise
from mpipipe.nn.kernels.host.flat import adamw, sgd, sum_of_squares, summed, sums_of_squares  # noqa: F401  # kernels, too
from mpipipe.nn.kernels.host.products import (  # noqa: F401  # kernels, too
    add_parts,
    linear,
    linear_backward_input,
    linear_backward_weight,
    products,
    sum_rows,
)
from mpipipe.nn.random import random_bits
from mpipipe.processor import each

SHORT = 64  # elements of a row that `copy` moves as one item
LAID = 1 << 14  # elements of which `copy` moves rows


# -- single passes ---------------------------------------------------------------------------------


def add(x: HostArray, y: HostArray) -> HostArray:
    """Return x + y."""
    return elementwise(np.add, np.empty_like(x), x, y)


def accumulate(grad: HostArray, part: HostArray) -> None:
    """Grad += part."""
    elementwise(np.add, grad, grad, part)


def scale(x: HostArray, factor: float, out: HostArray | None = None) -> HostArray:
    """Return x * factor, in `out` where it is given."""
    if x.size <= ELEMENTS:
        return np.multiply(x, factor, out=out)
    if out is None:
        out = np.empty_like(x)
    return elementwise(lambda part, out: np.multiply(part, factor, out=out), out, x)


def copy(source: HostArray, target: HostArray) -> None:
    """Target = source, with any strides; too large is infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        elementwise(_copy, target, source)


def _copy(source: HostArray, out: HostArray) -> None:
    # Short rows move faster than their elements.
    short = source.ndim > 1 and source.shape[-1] <= SHORT
    if source.size >= LAID and short and source.dtype == out.dtype:
        if source.strides[-1] == out.strides[-1] == source.itemsize:
            row = np.dtype((np.void, source.itemsize * source.shape[-1]))
            source = source.view(row)
            out = out.view(row)
    out[...] = source


# -- rotary positions ------------------------------------------------------------------------------


def rope_table(angles: HostArray, amplitude: float, dtype: np.dtype) -> HostArray:
    """Return the factors for `apply_rope`: complex (seq, 1, head_dim / 2)."""
    table = np.exp(1j * angles)
    if amplitude != 1:
        table *= amplitude
    table = table.astype(np.result_type(dtype, np.complex64))[:, None, :]
    table.flags.writeable = False
    return table


def apply_rope(x: HostArray, table: HostArray, target: HostArray, inverse: bool = False) -> None:
    """Target = each pair of neighbours of x turned by its factor, or back by it with `inverse`."""
    factors = table
    if inverse:
        factors = table.conj()
    paired = x.strides[-1] == target.strides[-1] == x.itemsize

    def work(at: slice) -> None:
        if paired:
            np.multiply(_pairs(x[:, at]), factors[at], out=_pairs(target[:, at]))
        else:
            turned = _pairs(np.ascontiguousarray(x[:, at])) * factors[at]
            target[:, at] = turned.view(x.dtype)

    each(work, blocks(x.shape[1], x.size // max(1, x.shape[1])))


def _pairs(x: HostArray) -> HostArray:
    """Return x (..., head_dim) as complex (..., head_dim / 2), a view."""
    return x.view(np.result_type(x, np.complex64))


# -- embedding -------------------------------------------------------------------------------------


def embed(weight: HostArray, ids: HostArray) -> HostArray:
    """Return row `id` of the table for each id."""
    flat = ids.reshape(-1)
    width = weight.shape[1]
    rows = np.empty((flat.size, width), weight.dtype)
    each(lambda at: np.take(weight, flat[at], 0, rows[at], "clip"), blocks(*rows.shape))
    return rows.reshape(*ids.shape, width)


def embed_backward(dy: HostArray, ids: HostArray, grad: HostArray) -> None:
    """Add each row of dy to the row of grad that its id names."""
    if ids.size == 0:
        return
    ids = ids.reshape(-1)
    # Equal ids side by side, in the order of their rows.
    order = np.argsort(ids, kind="stable")
    ids, starts = np.unique(ids[order], return_index=True)
    rows = embed(dy.reshape(-1, dy.shape[-1]), order)
    # `reduceat` keeps the interpreter, so that threads would not help.
    grad[ids] += np.add.reduceat(rows, starts, axis=0)


# -- dropout ---------------------------------------------------------------------------------------


def dropout(
    x: HostArray, key: HostArray, counter: tuple[int, int, int], threshold: int, factor: float
) -> tuple[HostArray, HostArray]:
    """Return (y, keep): y = x * factor where the random bits reach `threshold`, else 0."""
    flat = x.reshape(-1)
    keep = np.empty(x.shape, bool)
    y = np.empty(x.shape, x.dtype)
    of_keep = keep.reshape(-1)
    of_y = y.reshape(-1)

    def work(at: slice) -> None:
        of_keep[at] = random_bits(key, counter, at.stop - at.start, at.start) >= threshold
        part = np.multiply(flat[at], of_keep[at], out=of_y[at])
        part *= factor

    each(work, blocks(flat.size))
    return y, keep


def dropout_backward(dy: HostArray, keep: HostArray, factor: float) -> HostArray:
    """Return dx = dy * factor where `keep`, else 0."""

    def work(dy: HostArray, keep: HostArray, out: HostArray) -> None:
        np.multiply(dy, keep, out=out)
        out *= factor

    return elementwise(work, np.empty(dy.shape, dy.dtype), dy, keep)


# -- Gelu and SwiGLU; nn/layers/linear.py has the formulas -----------------------------------------


_ROOT = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def gelu(x: HostArray) -> HostArray:
    """Return y."""

    def work(x: HostArray, out: HostArray) -> None:
        _tanh_term(x, out)
        out += 1
        out *= x
        out *= 0.5

    return elementwise(work, np.empty(x.shape, x.dtype), x)


def gelu_backward(dy: HostArray, x: HostArray) -> HostArray:
    """Return dx = dy ((1 + t) / 2 + x (1 - t^2) u' / 2).

    Here t = tanh(u) and u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2).
    """

    def work(dy: HostArray, x: HostArray, out: HostArray) -> None:
        t = _tanh_term(x, np.empty_like(x))
        np.multiply(x, x, out=out)
        out *= 3 * _CUBE * _ROOT
        out += _ROOT
        out *= x
        out *= 1 - t * t
        out += t
        out += 1
        out *= 0.5
        out *= dy

    return elementwise(work, np.empty(dy.shape, dy.dtype), dy, x)


def _tanh_term(x: HostArray, out: HostArray) -> HostArray:
    """Out = tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    np.multiply(x, x, out=out)
    out *= _ROOT * _CUBE
    out += _ROOT
    out *= x
    return np.tanh(out, out=out)


def swiglu(both: HostArray) -> HostArray:
    """Return silu(gate) * up."""
    hidden = both.shape[1] // 2
    gate = both[:, :hidden]
    up = both[:, hidden:]
    inner = np.empty(gate.shape, both.dtype)

    def work(at: slice) -> None:
        part = _sigmoid(gate[at], inner[at])
        part *= gate[at]
        part *= up[at]

    each(work, blocks(*inner.shape))
    return inner


def swiglu_backward(both: HostArray, dinner: HostArray) -> tuple[HostArray, HostArray]:
    """Return (gradient of both, h = silu(gate) * up); the latter overwrites `dinner`, which is dh.

    With s = sigmoid(gate) and a = gate * s: dup = dh * a, dgate = dh * up * (s + a - a * s).
    """
    hidden = dinner.shape[1]
    dboth = np.empty_like(both)

    def work(at: slice) -> None:
        gate = both[at, :hidden]
        up = both[at, hidden:]
        # It holds dh, and in the end h.
        inner = dinner[at]
        dgate = dboth[at, :hidden]
        dup = dboth[at, hidden:]
        s = _sigmoid(gate, np.empty_like(inner))
        a = gate * s
        np.multiply(a, s, out=dup)
        s += a
        s -= dup
        s *= up
        np.multiply(s, inner, out=dgate)
        np.multiply(a, inner, out=dup)
        np.multiply(a, up, out=inner)

    each(work, blocks(*dinner.shape))
    return dboth, dinner


def _sigmoid(x: HostArray, out: HostArray) -> HostArray:
    """Out = 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2.

    This never overflows, and tanh is numpy's fastest such function.
    """
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    out *= 0.5
    out += 0.5
    return out


# -- Normalisation of rows; nn/layers/norm.py has the formulas -------------------------------------
#
# Gradients of vectors are returned as matrices with a row for each piece, which add_parts adds to
# the gradient.


def norm(
    x: HostArray, gain: HostArray, bias: HostArray | None, eps: float
) -> tuple[HostArray, HostArray]:
    """Return (y, scale)."""
    y = np.empty(x.shape, x.dtype)
    scale = np.empty(len(x), x.dtype)

    def work(at: slice) -> None:
        part = x[at]
        out = y[at]
        if bias is not None:
            part = _centred(part, out)
        root = np.sqrt(np.vecdot(part, part) / part.shape[1] + eps)
        np.reciprocal(root, out=scale[at])
        np.multiply(part, scale[at, None], out=out)
        out *= gain
        if bias is not None:
            out += bias

    each(work, blocks(*x.shape))
    return y, scale


def norm_backward(
    dy: HostArray,
    x: HostArray,
    scale: HostArray,
    gain: HostArray,
    centred: bool,
    more: HostArray | None = None,
) -> tuple[HostArray, ...]:
    """Return (dx, part of dgain) and, where rows were centred, part of dbias."""
    dx = np.empty(x.shape, x.dtype)
    pieces = blocks(*x.shape)
    dgain = np.empty((len(pieces), len(gain)), gain.dtype)
    dbias = np.empty_like(dgain)

    def mean(terms: HostArray) -> HostArray:
        return (terms @ gain / len(gain))[:, None]

    def work(piece: tuple[int, slice]) -> None:
        number, at = piece
        part = dy[at]
        out = dx[at]
        r = scale[at, None]
        normal = x[at]
        if centred:
            normal = _centred(normal, out)
        normal = np.multiply(normal, r, order="C")
        product = part * normal
        np.add.reduce(product, 0, out=dgain[number])
        normal *= mean(product)
        np.multiply(part, gain, out=out)
        out -= normal
        out *= r
        if centred:
            out -= mean(part) * r
            np.add.reduce(part, 0, out=dbias[number])
        if more is not None:
            np.add(more[at], out, out=out)

    each(work, list(enumerate(pieces)))
    if centred:
        return (dx, dgain, dbias)
    return (dx, dgain)


def _centred(x: HostArray, out: HostArray) -> HostArray:
    """Out = x minus the mean of each row; return it."""
    return np.subtract(x, np.add.reduce(x, 1, keepdims=True) / x.shape[1], out=out)


# -- Losses and their gradients, times a factor that is applied before the gradient is rounded -----


def mean_squared_error(
    output: HostArray, target: HostArray, factor: float = 1.0
) -> tuple[float, HostArray]:
    """Return (mean of (output - target)^2 in float64, factor * its gradient).

    `target` has any dtype.
    """
    difference = elementwise(np.subtract, np.empty(output.shape, output.dtype), output, target)
    total = sum_of_squares(difference.reshape(-1))
    return total / output.size, scale(difference, 2 / output.size * factor, difference)


def softmax_cross_entropy(
    logits: HostArray, ids: HostArray, factor: float = 1.0, out: HostArray | None = None
) -> tuple[float, HostArray]:
    """Return (mean of -log softmax(logits)[id] in float64, factor * its gradient).

    It takes halves, too, and upcasts a piece at a time: logits are the largest arrays of all.
    """
    if out is None:
        out = np.empty(logits.shape, logits.dtype)
    gradient = out
    count = len(logits) / factor

    def term(at: slice) -> float:
        part = upcast(logits[at])
        picked = np.arange(len(part)), ids[at]
        to = part
        if logits.itemsize > 2:
            to = gradient[at]
        np.subtract(part, part.max(1, keepdims=True), out=to)
        hits = to[picked]
        np.exp(to, out=to)
        sums = np.add.reduce(to, 1, keepdims=True)
        value = float(np.sum(np.log(sums[:, 0], dtype=np.float64) - hits))
        sums *= count
        to /= sums
        to[picked] -= 1 / count
        if logits.itemsize == 2:
            copy(to, gradient[at])
        return value

    return summed(blocks(*logits.shape), term) / len(logits), gradient


# -- The sums of a `HeadSlice`, for every dtype; nn/layers/head_slices.py has the formulas ---------


def running_lse(
    logits: HostArray,
    ids: HostArray,
    columns: tuple[int, int],
    before: Sequence[HostArray],
    after: Sequence[HostArray],
) -> None:
    """Set L and t from those before and some columns of logits."""

    def work(at: slice) -> None:
        part = upcast(logits[at])
        lse = after[0][at]
        t = after[1][at]
        carried = before[0][at]
        top = np.maximum(part.max(1), carried)
        powers = part - top[:, None]
        np.add.reduce(np.exp(powers, out=powers), 1, out=lse)
        lse += np.exp(carried - top)
        np.log(lse, out=lse)
        lse += top
        t[...] = before[1][at]
        rows, hits = _hits(ids[at], columns[0], part.shape[1])
        t[rows] += part[rows, hits]

    each(work, blocks(*logits.shape))


def running_lse_backward(
    logits: HostArray,
    ids: HostArray,
    first: int,
    lse: HostArray,
    slopes: Sequence[HostArray],
    out: HostArray,
) -> None:
    """Set the gradient of the logits."""

    def work(at: slice) -> None:
        part = float32_like(out[at])
        np.subtract(upcast(logits[at]), lse[at, None], out=part)
        np.exp(part, out=part)
        part *= slopes[0][at, None]
        rows, hits = _hits(ids[at], first, part.shape[1])
        part[rows, hits] += slopes[1][at][rows]
        round_into(out[at], part)

    each(work, blocks(*logits.shape))


def _hits(ids: HostArray, first: int, count: int) -> tuple[HostArray, HostArray]:
    """Return the rows whose ids are among some columns, and the columns of these."""
    columns = ids.astype(np.int64) - first
    rows = np.flatnonzero((columns >= 0) & (columns < count))
    return rows, columns[rows]
