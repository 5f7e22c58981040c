"""Activations: Gelu alone, and SwiGLU with the matrices around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.checks import check_features, check_positive
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.layers.weight_gradients import Projection, projections_of_rows
from mpipipe.nn.parameters import Parameter, normal, zeros


class Gelu(Layer):
    """y = x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), element by element, for x of any shape.

    The tanh form of Hendrycks and Gimpel, "Gaussian error linear units" (2016); it differs from the exact
    x * Phi(x) by at most 5e-4.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Linear(3, 8), nn.Gelu(), nn.Linear(8, 2)])
    >>> stage.forward(np.ones((4, 3), np.float32))[0].shape
    (4, 2)
    """

    takes_integers = False
    recordable = True

    def forward(self, x: Array) -> tuple[Array, Any]:
        return self.stage.kernels.gelu(x), x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.stage.kernels.gelu_backward(dy, saved), None


class SwiGLU(Layer):
    """The gated feed-forward layer: y = (silu(x G^T) * (x U^T)) D^T over the last axis of x.

    silu(g) = g * sigmoid(g) (Shazeer, "GLU variants improve transformer", 2020). The parameter `gate_up` is G above U,
    (2 * hidden, dim), so that both are one product; `down` is D, (dim, hidden).

    Parameters
    ----------
    dim : int
        Size of the last axis of x and y.
    hidden : int
        Inner width.
    gain : float
        `down` starts normal with standard deviation gain / sqrt(hidden).
    bias : bool
        Whether the products have biases: parameters `gate_up_bias` (2 * hidden,) and `down_bias` (dim,), of zeros at
        the start.

    Raises
    ------
    ArgumentError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.SwiGLU(8, 64)])
    >>> stage.forward(np.ones((2, 5, 8), np.float32))[0].shape
    (2, 5, 8)
    """

    takes_integers = False
    recordable = True
    replaced = ("gate_up", "down", "gate_up_bias", "down_bias")
    freezes_parts = True

    gate_up: np.ndarray
    gate_up_grad: np.ndarray
    down: np.ndarray
    down_grad: np.ndarray
    gate_up_bias: np.ndarray | None = None
    gate_up_bias_grad: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    down_bias_grad: np.ndarray | None = None

    def __init__(self, dim: int, hidden: int, gain: float = 1.0, bias: bool = False):
        check_positive(dim=dim, hidden=hidden)
        self.dim, self.hidden = dim, hidden
        self.declared = {
            "gate_up": Parameter((2 * hidden, dim), normal(dim**-0.5)),
            "down": Parameter((dim, hidden), normal(gain * hidden**-0.5)),
        }
        if bias:
            self.declared["gate_up_bias"] = Parameter((2 * hidden,), zeros, decay=False)
            self.declared["down_bias"] = Parameter((dim,), zeros, decay=False)

    def projections(self) -> dict[str, Projection]:
        halves = projections_of_rows("gate_up", {"gate_proj": self.hidden, "up_proj": self.hidden})
        return {**halves, "down_proj": Projection("down", 0, self.dim)}

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_features(self, x, self.dim)
        kernels, flat = self.stage.kernels, rows(x)
        both = kernels.linear(flat, self.gate_up, self.gate_up_bias)
        return kernels.linear(kernels.swiglu(both), self.down, self.down_bias).reshape(x.shape), (flat, both)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        kernels, (x, both) = self.stage.kernels, saved
        dflat = rows(dy)
        dboth, inner = kernels.swiglu_backward(both, kernels.linear_backward_input(dflat, self.down))
        dx = kernels.linear_backward_input(dboth, self.gate_up)
        return dx.reshape(dy.shape), (x, dboth, dflat, inner)

    def backward_weight(self, pending: Any) -> None:
        x, dboth, dy, inner = pending
        self.add_product("gate_up", dboth, x)
        self.add_product("down", dy, inner)
        self.add_rows("gate_up_bias", dboth)
        self.add_rows("down_bias", dy)
