"""The kernels on numpy arrays of float32 or float64.

Large arrays are worked on in pieces that stay in a core's cache from the first pass to the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from mpipipe.nn.kernels.host import ELEMENTS, blocks
from mpipipe.nn.kernels.interface import AdamWNumbers, Update
from mpipipe.nn.random import random_bits
from mpipipe.nn.rope import RopeScaling, angles

SHORT = 64  # elements of a row that `copy` moves as one item
_PIECE = 1 << 17  # elements of one piece of a weight gradient: half a MiB of float32, which stays in cache


# -- products ---------------------------------------------------------------------------------------------------------


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return y = x weight^T + bias."""
    y = np.matmul(x, weight.T)
    return y if bias is None else np.add(y, bias, out=y)


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


def products(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, transpose_a: bool = False, transpose_b: bool = False, add: bool = False
) -> None:
    """C = a b or, with `add`, c += a b, for each of some problems."""
    a = a.swapaxes(1, 2) if transpose_a else a
    b = b.swapaxes(1, 2) if transpose_b else b
    product = np.matmul(a, b, out=None if add else c)
    if add:
        np.add(c, product, out=c)


def sum_rows(dy: np.ndarray, grad: np.ndarray) -> None:
    """Grad += the sum of the rows of dy."""
    np.add(grad, np.add.reduce(dy, 0), out=grad)


def add_parts(parts: np.ndarray, grad: np.ndarray) -> None:
    """Grad += the sum of the rows of parts."""
    np.add(grad, parts[0] if len(parts) == 1 else np.add.reduce(parts, 0), out=grad)


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


def copy(source: np.ndarray, target: np.ndarray, add: bool = False) -> None:
    """Target = source or, with `add`, target += source, with any strides."""
    if add:
        np.add(target, source, out=target, casting="same_kind")
        return
    large = 2 * source.size >= ELEMENTS and source.ndim > 1 and source.dtype == target.dtype
    if large and source.shape[-1] <= SHORT and source.strides[-1] == target.strides[-1] == source.itemsize:
        row = np.dtype((np.void, source.itemsize * source.shape[-1]))  # rows move faster than their elements
        source, target = source.view(row), target.view(row)
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
    turned, amplitude = angles(positions, head_dim, base, scaling)
    table = np.exp(1j * turned)
    if amplitude != 1:
        table *= amplitude
    table = table.astype(_complex_of(dtype))[:, None, :]
    table.flags.writeable = False
    return table


def apply_rope(x: np.ndarray, table: np.ndarray, target: np.ndarray, inverse: bool = False) -> None:
    """Target = each pair of neighbours of x turned by its factor, or back by it with `inverse`."""
    factors = table.conj() if inverse else table
    if x.strides[-1] == target.strides[-1] == x.itemsize:
        np.multiply(_pairs(x), factors, out=_pairs(target))
    else:
        turned = np.multiply(_pairs(np.ascontiguousarray(x)), factors)
        target[...] = turned.view(x.dtype)


def _pairs(x: np.ndarray) -> np.ndarray:
    """Return x (..., head_dim) as complex (..., head_dim / 2), a view."""
    return x.view(_complex_of(x.dtype))


def _complex_of(dtype: np.dtype) -> np.dtype:
    """Return complex128 for float64, complex64 for all others."""
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


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
    grad[ids[starts]] += np.add.reduceat(dy.reshape(-1, dy.shape[-1])[order], starts, axis=0)


# -- dropout ----------------------------------------------------------------------------------------------------------


def dropout(
    x: np.ndarray, key: np.ndarray, counter: tuple[int, int, int], threshold: int, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (y, keep): y = x * factor where `keep`, the random bits of (key, counter) reach `threshold`; else 0."""
    keep = random_bits(key, counter, x.size).reshape(x.shape) >= threshold
    return dropout_backward(x, keep, factor), keep


def dropout_backward(dy: np.ndarray, keep: np.ndarray, factor: float) -> np.ndarray:
    """Return dx = dy * factor where `keep`, else 0."""
    dx = np.multiply(dy, keep)
    return np.multiply(dx, factor, out=dx)


# -- Gelu and SwiGLU; nn/layers/linear.py has the formulas --------------------------------------------------------


_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


def gelu(x: np.ndarray) -> np.ndarray:
    """Return y."""
    flat = x.reshape(-1)
    y = np.empty(flat.shape, flat.dtype)
    for at in blocks(flat.size):
        part, out = flat[at], y[at]
        _tanh_term(part, out)
        np.add(out, 1, out=out)
        np.multiply(out, part, out=out)
        np.multiply(out, 0.5, out=out)
    return y.reshape(x.shape)


def gelu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return dx = dy ((1 + t) / 2 + x (1 - t^2) u' / 2), t = tanh(u), u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)."""
    dflat, flat = dy.reshape(-1), x.reshape(-1)
    dx = np.empty(dflat.shape, dflat.dtype)
    for at in blocks(dflat.size):
        part, out = flat[at], dx[at]
        t = _tanh_term(part, np.empty(part.shape, part.dtype))
        np.multiply(part, part, out=out)
        np.multiply(out, 3 * _CUBE * _ROOT, out=out)
        np.add(out, _ROOT, out=out)
        np.multiply(out, part, out=out)
        rest = np.multiply(t, t)
        np.subtract(1, rest, out=rest)
        np.multiply(out, rest, out=out)
        np.add(out, t, out=out)
        np.add(out, 1, out=out)
        np.multiply(out, 0.5, out=out)
        np.multiply(out, dflat[at], out=out)
    return dx.reshape(dy.shape)


def _tanh_term(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Out = tanh(sqrt(2 / pi) (x + 0.044715 x^3)) = tanh(x (sqrt(2 / pi) + sqrt(2 / pi) 0.044715 x^2))."""
    np.multiply(x, x, out=out)
    np.multiply(out, _ROOT * _CUBE, out=out)
    np.add(out, _ROOT, out=out)
    np.multiply(out, x, out=out)
    return np.tanh(out, out=out)


def swiglu(both: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up."""
    hidden = both.shape[1] // 2
    gate, up = both[:, :hidden], both[:, hidden:]
    inner = np.empty(gate.shape, both.dtype)
    for at in blocks(*inner.shape):
        part = _sigmoid(gate[at], inner[at])
        np.multiply(part, gate[at], out=part)
        np.multiply(part, up[at], out=part)
    return inner


def swiglu_backward(both: np.ndarray, dinner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (gradient of both, h = silu(gate) * up); the latter overwrites `dinner`, which is dh.

    With s = sigmoid(gate) and a = gate * s: dup = dh * a, dgate = dh * up * (s + a - a * s).
    """
    hidden, dboth = dinner.shape[1], np.empty_like(both)
    for at in blocks(*dinner.shape):
        gate, up, inner = both[at, :hidden], both[at, hidden:], dinner[at]  # which holds dh, and in the end h
        dgate, dup = dboth[at, :hidden], dboth[at, hidden:]
        s = _sigmoid(gate, np.empty(inner.shape, inner.dtype))
        a = np.multiply(gate, s)
        np.multiply(a, s, out=dup)
        np.add(s, a, out=s)
        np.subtract(s, dup, out=s)
        np.multiply(s, up, out=s)
        np.multiply(s, inner, out=dgate)
        np.multiply(a, inner, out=dup)
        np.multiply(a, up, out=inner)
    return dboth, dinner


def _sigmoid(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Out = 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2: never overflows, and tanh is numpy's fastest such function."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    return np.add(out, 0.5, out=out)


# -- Normalisation of rows; nn/layers/norm.py has the formulas --------------------------------------------------------
#
# Gradients of vectors are returned as matrices of one row, which add_parts adds to the gradient.


def rms_norm(
    x: np.ndarray, gain: np.ndarray, eps: float, more: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (x + more, y, scale)."""
    total = x if more is None else np.add(x, more)
    y, scale = np.empty(x.shape, x.dtype), np.empty(len(x), x.dtype)
    for at in blocks(*x.shape):
        part = total[at]
        _inverse_root(part, eps, scale[at])
        out = np.multiply(part, scale[at, None], out=y[at])
        np.multiply(out, gain, out=out)
    return total, y, scale


def rms_norm_backward(
    dy: np.ndarray, x: np.ndarray, scale: np.ndarray, gain: np.ndarray, more: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Return (dx, part of dgain)."""
    dx, dgain = np.empty(x.shape, x.dtype), np.zeros_like(gain)
    for at in blocks(*x.shape):
        normal = np.multiply(x[at], scale[at, None])
        _backward_block(dy[at], normal, scale[at, None], gain, dx[at], dgain)
        if more is not None:
            np.add(more[at], dx[at], out=dx[at])
    return dx, dgain[None]


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float, more: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (x + more, y, scale)."""
    total = x if more is None else np.add(x, more)
    y, scale = np.empty(x.shape, x.dtype), np.empty(len(x), x.dtype)
    for at in blocks(*x.shape):
        out = _centred(total[at], y[at])
        _inverse_root(out, eps, scale[at])
        np.multiply(out, scale[at, None], out=out)
        np.multiply(out, gain, out=out)
        np.add(out, bias, out=out)
    return total, y, scale


def layer_norm_backward(
    dy: np.ndarray, x: np.ndarray, scale: np.ndarray, gain: np.ndarray, more: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Return (dx, part of dgain, part of dbias)."""
    dx, dgain, dbias = np.empty(x.shape, x.dtype), np.zeros_like(gain), np.zeros_like(gain)
    for at in blocks(*x.shape):
        part = dy[at]
        normal = _centred(x[at], np.empty(part.shape, part.dtype))
        np.multiply(normal, scale[at, None], out=normal)
        mean = np.matmul(part, gain)
        np.divide(mean, len(gain), out=mean)
        np.multiply(mean, scale[at], out=mean)
        _backward_block(part, normal, scale[at, None], gain, dx[at], dgain)
        np.subtract(dx[at], mean[:, None], out=dx[at])
        np.add(dbias, np.add.reduce(part, 0), out=dbias)
        if more is not None:
            np.add(more[at], dx[at], out=dx[at])
    return dx, dgain[None], dbias[None]


def _inverse_root(x: np.ndarray, eps: float, out: np.ndarray) -> None:
    """Out = 1 / sqrt(mean(x^2) + eps) of each row of x."""
    square = np.vecdot(x, x)
    np.divide(square, x.shape[1], out=square)
    np.add(square, eps, out=square)
    np.sqrt(square, out=square)
    np.reciprocal(square, out=out)


def _centred(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Out = x minus the mean of each row; return it."""
    mean = np.add.reduce(x, 1, keepdims=True)
    np.divide(mean, x.shape[1], out=mean)
    return np.subtract(x, mean, out=out)


def _backward_block(
    dy: np.ndarray, normal: np.ndarray, scale: np.ndarray, gain: np.ndarray, dx: np.ndarray, dgain: np.ndarray
) -> None:
    """Dx = r * (gain * dy - n * mean(gain * dy * n)); dgain += sum over rows of dy * n. Overwrites `normal`, n."""
    product = np.multiply(dy, normal)
    np.add(dgain, np.add.reduce(product, 0), out=dgain)
    mean = np.matmul(product, gain)
    np.divide(mean, len(gain), out=mean)
    np.multiply(normal, mean[:, None], out=normal)
    np.multiply(dy, gain, out=dx)
    np.subtract(dx, normal, out=dx)
    np.multiply(dx, scale, out=dx)


# -- Losses and their gradients, times a factor that is applied before the gradient is rounded ------------------------


def mean_squared_error(output: np.ndarray, target: np.ndarray, factor: float = 1.0) -> tuple[float, np.ndarray]:
    """Return (mean of (output - target)^2, summed in float64; factor * its gradient); `target` has any dtype."""
    if target.dtype == output.dtype:
        difference = output - target
    else:
        difference = np.subtract(output, target, out=np.empty(output.shape, output.dtype), casting="same_kind")
    total = sum_of_squares(difference.reshape(-1))
    difference *= 2 / output.size * factor
    return total / output.size, difference


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


# -- Optimizers: updates of flat buffers, in place and in pieces that stay in cache -----------------------------------


WHOLE = Update()


def adamw(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, numbers: AdamWNumbers, update: Update = WHOLE
) -> None:
    """Make one step of AdamW, in place."""
    b1, b2, eps, rate, correction1, correction2, shrink = numbers
    step, root = rate / correction1, 1 / math.sqrt(correction2)
    for at, part, grad, decays in _pieces(p, g, update):
        first, second = m[at], v[at]
        work = np.multiply(grad, 1 - b1)
        np.multiply(first, b1, out=first)
        np.add(first, work, out=first)
        np.multiply(grad, grad, out=work)
        np.multiply(work, 1 - b2, out=work)
        np.multiply(second, b2, out=second)
        np.add(second, work, out=second)
        np.sqrt(second, out=work)
        np.multiply(work, root, out=work)
        np.add(work, eps, out=work)
        np.divide(first, work, out=work)
        np.multiply(work, step, out=work)
        if decays and shrink != 1:
            np.multiply(part, shrink, out=part)
        np.subtract(part, work, out=part)


def sgd(
    p: np.ndarray,
    g: np.ndarray,
    u: np.ndarray | None,
    momentum: float,
    decay: float,
    rate: float,
    update: Update = WHOLE,
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    for at, part, grad, decays in _pieces(p, g, update):
        change = grad + part * decay if decays and decay else grad
        if u is not None:
            kept = u[at]
            np.multiply(kept, momentum, out=kept)
            change = np.add(kept, change, out=kept)
        np.subtract(part, change * rate, out=part)


def _pieces(p: np.ndarray, g: np.ndarray, update: Update) -> Iterator[tuple[slice, np.ndarray, np.ndarray, bool]]:
    """Yield (piece, parameters, scaled gradients, whether they decay), none across ranges; round each when it is done.

    Pieces stay in cache from the first pass to the last.
    """
    for start, stop, decays in [(0, p.size, True)] if update.ranges is None else update.ranges:
        for block in blocks(stop - start):
            at = slice(start + block.start, min(stop, start + block.stop))
            yield at, p[at], g[at] if update.g_scale == 1 else np.multiply(g[at], update.g_scale), decays
            if update.copy is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    update.copy[at] = p[at]


def sums_of_squares(flat: np.ndarray, offsets: Sequence[tuple[int, int]], out: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64; in `out` where that is given."""
    out = np.empty(len(offsets)) if out is None else out
    out[:] = [sum_of_squares(flat[start:stop]) for start, stop in offsets]
    return out


def sum_of_squares(flat: np.ndarray) -> float:
    """Return the sum of flat^2, in float64."""
    if flat.size <= ELEMENTS:  # a small loss is asked for its sum once a micro-batch: no loop around it
        wide = flat.astype(np.float64, copy=False)
        return float(wide.dot(wide))
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
