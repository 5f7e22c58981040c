"""Gelu and SwiGLU; nn/layers/activation.py has the formulas."""

from __future__ import annotations

import math

import numpy as np

from mpipipe.nn.cache_blocks import blocks

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
    """Return (gradient of both, silu(gate) * up); the latter overwrites `dinner`."""
    dboth = np.empty_like(both)
    for at in blocks(*dinner.shape):
        _swiglu_backward_block(both[at], dboth[at], dinner[at])
    return dboth, dinner


def _sigmoid(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Out = 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2: never overflows, and tanh is numpy's fastest such function."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    return np.add(out, 0.5, out=out)


def _swiglu_backward_block(both: np.ndarray, dboth: np.ndarray, inner: np.ndarray) -> None:
    """Dboth = gradients of gate and up, where `inner` holds the gradient of h = silu(gate) * up.

    With s = sigmoid(gate) and a = gate * s: dup = dh * a, dgate = dh * up * (s + a - a * s). Leaves h in `inner`.
    """
    hidden = inner.shape[1]
    gate, up = both[:, :hidden], both[:, hidden:]
    dgate, dup = dboth[:, :hidden], dboth[:, hidden:]
    s = _sigmoid(gate, np.empty(inner.shape, inner.dtype))
    a = np.multiply(gate, s)
    np.multiply(a, s, out=dup)
    np.add(s, a, out=s)
    np.subtract(s, dup, out=s)
    np.multiply(s, up, out=s)
    np.multiply(s, inner, out=dgate)
    np.multiply(a, inner, out=dup)
    np.multiply(a, up, out=inner)
