"""Normalisation of rows; nn/layers/norm.py has the formulas.

Gradients of vectors are returned as matrices of one row, which add_parts adds to the gradient.
"""

from __future__ import annotations

import numpy as np

from mpipipe.nn.cache_blocks import blocks


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (y, scale)."""
    y, scale = np.empty(x.shape, x.dtype), np.empty(len(x), x.dtype)
    for at in blocks(*x.shape):
        part = x[at]
        _inverse_root(part, eps, scale[at])
        out = np.multiply(part, scale[at, None], out=y[at])
        np.multiply(out, gain, out=out)
    return y, scale


def add_rms_norm(
    x: np.ndarray, more: np.ndarray, gain: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (x + more, y, scale)."""
    total = np.add(x, more)
    return (total, *rms_norm(total, gain, eps))


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


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (y, scale)."""
    y, scale = np.empty(x.shape, x.dtype), np.empty(len(x), x.dtype)
    for at in blocks(*x.shape):
        out = _centred(x[at], y[at])
        _inverse_root(out, eps, scale[at])
        np.multiply(out, scale[at, None], out=out)
        np.multiply(out, gain, out=out)
        np.add(out, bias, out=out)
    return y, scale


def add_layer_norm(
    x: np.ndarray, more: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (x + more, y, scale)."""
    total = np.add(x, more)
    return (total, *layer_norm(total, gain, bias, eps))


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
