"""Activations: Gelu alone, and SwiGLU with the matrices around it."""

from __future__ import annotations

import numpy as np

from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.layers.layer import Layer, check_features, check_positive
from mpipipe.nn.parameters import Parameter, normal


class Gelu(Layer):
    """y = x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), element by element.

    The tanh form of Hendrycks and Gimpel, "Gaussian error linear units" (2016); it differs from the exact
    x * Phi(x) by at most 5e-4.
    """

    def forward(self, x):
        return self.stage.kernels.gelu(x), x

    def backward_input(self, dy, saved):
        return self.stage.kernels.gelu_backward(dy, saved), None


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
        kernels, flat = self.stage.kernels, rows(x)
        both = kernels.linear(flat, self.gate_up)
        return kernels.linear(kernels.swiglu(both), self.down).reshape(x.shape), (flat, both)

    def backward_input(self, dy, saved):
        kernels, (x, both) = self.stage.kernels, saved
        dflat = rows(dy)
        dboth, inner = kernels.swiglu_backward(both, kernels.linear_backward_input(dflat, self.down))
        dx = kernels.linear_backward_input(dboth, self.gate_up)
        return dx.reshape(dy.shape), (x, dboth, dflat, inner)

    def backward_weight(self, pending):
        x, dboth, dy, inner = pending
        self.stage.kernels.linear_backward_weight(dboth, x, self.gate_up_grad)
        self.stage.kernels.linear_backward_weight(dy, inner, self.down_grad)
