"""Activations: Gelu alone, and SwiGLU with the matrices around it."""

from __future__ import annotations

import math

import numpy as np

from mpipipe.nn.blocks import blocks, rows
from mpipipe.nn.layer import Layer, check_features, check_positive
from mpipipe.nn.linear import add_product
from mpipipe.nn.parameters import Parameter, normal

_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


class Gelu(Layer):
    """y = x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), element by element.

    The tanh form of Hendrycks and Gimpel, "Gaussian error linear units" (2016); it differs from the exact
    x * Phi(x) by at most 5e-4.
    """

    def forward(self, x):
        flat = x.reshape(-1)
        y = np.empty(flat.shape, flat.dtype)
        for at in blocks(flat.size):
            part, out = flat[at], y[at]
            _tanh_term(part, out)
            np.add(out, 1, out=out)
            np.multiply(out, part, out=out)
            np.multiply(out, 0.5, out=out)
        return y.reshape(x.shape), flat

    def backward_input(self, dy, saved):
        """dy/dx = (1 + t) / 2 + x (1 - t^2) u' / 2 with t = tanh(u), u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)."""
        dflat = dy.reshape(-1)
        dx = np.empty(dflat.shape, dflat.dtype)
        for at in blocks(dflat.size):
            x, out = saved[at], dx[at]
            t = _tanh_term(x, np.empty(x.shape, x.dtype))
            np.multiply(x, x, out=out)
            np.multiply(out, 3 * _CUBE * _ROOT, out=out)
            np.add(out, _ROOT, out=out)
            np.multiply(out, x, out=out)
            slope = np.multiply(t, t)
            np.subtract(1, slope, out=slope)
            np.multiply(out, slope, out=out)
            np.add(out, t, out=out)
            np.add(out, 1, out=out)
            np.multiply(out, 0.5, out=out)
            np.multiply(out, dflat[at], out=out)
        return dx.reshape(dy.shape), None


def _tanh_term(x, out):
    """out = tanh(sqrt(2 / pi) (x + 0.044715 x^3)) = tanh(x (sqrt(2 / pi) + sqrt(2 / pi) 0.044715 x^2))."""
    np.multiply(x, x, out=out)
    np.multiply(out, _ROOT * _CUBE, out=out)
    np.add(out, _ROOT, out=out)
    np.multiply(out, x, out=out)
    return np.tanh(out, out=out)


class SwiGLU(Layer):
    """The gated feed-forward layer with its three matrices: y = (silu(x G^T) * (x U^T)) D^T, without biases.

    silu(g) = g * sigmoid(g) (Shazeer, "GLU variants improve transformer", 2020).

    Parameters
    ----------
    dim, hidden : sizes; `gate_up` is G above U, (2 * hidden, dim), so that both are one product; `down` is D,
        (dim, hidden)
    gain : `down` starts normal with standard deviation gain / sqrt(hidden)
    """

    gate_up: np.ndarray
    gate_up_grad: np.ndarray
    down: np.ndarray
    down_grad: np.ndarray

    def __init__(self, dim: int, hidden: int, gain: float = 1.0):
        check_positive(dim=dim, hidden=hidden)
        self.dim, self.hidden = dim, hidden
        self.declared = {
            "gate_up": Parameter((2 * hidden, dim), normal(dim**-0.5)),
            "down": Parameter((dim, hidden), normal(gain * hidden**-0.5)),
        }

    def forward(self, x):
        check_features(self, x, self.dim)
        flat = rows(x)
        both = np.matmul(flat, self.gate_up.T)
        gate, up = both[:, : self.hidden], both[:, self.hidden :]
        inner = np.empty((len(flat), self.hidden), flat.dtype)
        for at in blocks(*inner.shape):
            part = _sigmoid(gate[at], inner[at])
            np.multiply(part, gate[at], out=part)
            np.multiply(part, up[at], out=part)
        return np.matmul(inner, self.down.T).reshape(x.shape), (flat, both)

    def backward_input(self, dy, saved):
        x, both = saved
        dflat = rows(dy)
        inner = np.matmul(dflat, self.down)  # its gradient first, then itself
        dboth = np.empty_like(both)
        for at in blocks(*inner.shape):
            _swiglu_backward(both[at], dboth[at], inner[at])
        dx = np.matmul(dboth, self.gate_up)
        return dx.reshape(dy.shape), (x, dboth, dflat, inner)

    def backward_weight(self, pending):
        x, dboth, dy, inner = pending
        add_product(self.gate_up_grad, dboth, x)
        add_product(self.down_grad, dy, inner)


def _sigmoid(x, out):
    """1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2: never overflows, and tanh is numpy's fastest such function."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    return np.add(out, 0.5, out=out)


def _swiglu_backward(both, dboth, inner):
    """Rows of the gradients of gate and up into `dboth`, where `inner` holds the gradient of h = silu(gate) * up.

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
