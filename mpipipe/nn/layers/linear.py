"""The linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.nn.checks import check_features, check_positive, rows
from mpipipe.nn.layers.layer import Layer, Projection, stacked_projections
from mpipipe.nn.parameters import Parameter, normal, zeros


class Linear(Layer):
    """y = x W^T + b over the last axis of x: (..., inputs) to (..., outputs).

    Parameters
    ----------
    inputs, outputs : int
        Sizes of the last axis of x and of y. The parameter `weight` is (outputs, inputs).
    bias : bool
        Whether there is a parameter `bias` (outputs,), of zeros at the start.
    tie : str, optional
        Key of `Parameter.tie` for the weight.
    gain : float
        The weight starts normal with standard deviation gain / sqrt(inputs).

    Raises
    ------
    ArgumentError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Linear(3, 2)])
    >>> y, saved = stage.forward(np.ones((4, 3), np.float32))
    >>> y.shape, sorted(stage.parameters)
    ((4, 2), ['0.bias', '0.weight'])
    """

    takes_integers = False
    recordable = True
    freezes_parts = True

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = True, tie: str | None = None, gain: float = 1.0):
        check_positive(inputs=inputs, outputs=outputs)
        self.inputs, self.outputs = inputs, outputs
        self.declared = {"weight": Parameter((outputs, inputs), normal(gain * inputs**-0.5), tie=tie)}
        if bias:
            self.declared["bias"] = Parameter((outputs,), zeros, decay=False)

    def projections(self) -> dict[str, Projection]:
        return {"linear": Projection("weight", 0, self.outputs)}

    def forward(self, x: Array) -> tuple[Array, Any]:
        if x.ndim != 2:
            check_features(self, x, self.inputs)
            y, saved = self.forward(x.reshape(-1, self.inputs))
            return y.reshape(*x.shape[:-1], self.outputs), saved
        if x.shape[1] != self.inputs:
            check_features(self, x, self.inputs)
        return self.stage.kernels.linear(x, self.weight, self.bias), x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        if dy.ndim != 2:
            shape = (*dy.shape[:-1], self.inputs)
            dy = dy.reshape(-1, self.outputs)
            return self.stage.kernels.linear_backward_input(dy, self.weight).reshape(shape), (dy, saved)
        return self.stage.kernels.linear_backward_input(dy, self.weight), (dy, saved)

    def backward_weight(self, pending: Any) -> None:
        dy, x = pending
        self._add_product("weight", dy, x)
        self._add("bias", self.stage.kernels.sum_rows, dy)


# -- The feed-forward layer of GPT-2: two products with GELU between them ---------------------------------------------


class FeedForward(Layer):
    """y = gelu(x U^T + u) D^T + d over the last axis of x, with the gelu of `nn.Gelu`.

    The parameter `up` is U, (hidden, dim), and `down` is D, (dim, hidden). What is kept for the backward inside is the
    input of gelu alone: its output is computed again.

    Parameters
    ----------
    dim : int
        Size of the last axis of x and y.
    hidden : int
        Inner width.
    bias : bool
        Whether there are parameters `up_bias` (hidden,) and `down_bias` (dim,), of zeros at the start.
    gain : float
        `down` starts normal with standard deviation gain / sqrt(hidden).

    Raises
    ------
    ArgumentError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.FeedForward(8, 32)])
    >>> stage.forward(np.ones((2, 5, 8), np.float32))[0].shape, sorted(stage.parameters)
    ((2, 5, 8), ['0.down', '0.down_bias', '0.up', '0.up_bias'])
    """

    takes_integers = False
    recordable = True
    freezes_parts = True

    up: np.ndarray
    down: np.ndarray
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    def __init__(self, dim: int, hidden: int, bias: bool = True, gain: float = 1.0):
        check_positive(dim=dim, hidden=hidden)
        self.dim, self.hidden = dim, hidden
        self.declared = {
            "up": Parameter((hidden, dim), normal(dim**-0.5)),
            "down": Parameter((dim, hidden), normal(gain * hidden**-0.5)),
        }
        if bias:
            self.declared["up_bias"] = Parameter((hidden,), zeros, decay=False)
            self.declared["down_bias"] = Parameter((dim,), zeros, decay=False)

    def projections(self) -> dict[str, Projection]:
        return {"c_fc": Projection("up", 0, self.hidden), "c_proj": Projection("down", 0, self.dim)}

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_features(self, x, self.dim)
        kernels, flat = self.stage.kernels, rows(x)
        inner = kernels.linear(flat, self.up, self.up_bias)
        return kernels.linear(kernels.gelu(inner), self.down, self.down_bias).reshape(x.shape), (flat, inner)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        kernels, (x, inner) = self.stage.kernels, saved
        dflat = rows(dy)
        dinner = kernels.gelu_backward(kernels.linear_backward_input(dflat, self.down), inner)
        return kernels.linear_backward_input(dinner, self.up).reshape(dy.shape), (x, dinner, dflat, inner)

    def backward_weight(self, pending: Any) -> None:
        x, dinner, dy, inner = pending
        self._add_product("up", dinner, x)
        if self._trains("down"):
            self._add_product("down", dy, self.stage.kernels.gelu(inner))
        self._add("up_bias", self.stage.kernels.sum_rows, dinner)
        self._add("down_bias", self.stage.kernels.sum_rows, dy)


# -- Activations: Gelu alone, and SwiGLU with the matrices around it --------------------------------------------------


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
    freezes_parts = True

    gate_up: np.ndarray
    down: np.ndarray
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

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
        halves = stacked_projections("gate_up", {"gate_proj": self.hidden, "up_proj": self.hidden})
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
        self._add_product("gate_up", dboth, x)
        self._add_product("down", dy, inner)
        self._add("gate_up_bias", self.stage.kernels.sum_rows, dboth)
        self._add("down_bias", self.stage.kernels.sum_rows, dy)
