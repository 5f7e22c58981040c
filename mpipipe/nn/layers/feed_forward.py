"""The feed-forward layer of GPT-2: two products with GELU between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.checks import check_features, check_positive
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.layers.weight_gradients import Projection
from mpipipe.nn.parameters import Parameter, normal, zeros


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
    replaced = ("up", "down", "up_bias", "down_bias")
    freezes_parts = True

    up: np.ndarray
    up_grad: np.ndarray
    down: np.ndarray
    down_grad: np.ndarray
    up_bias: np.ndarray | None = None
    up_bias_grad: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    down_bias_grad: np.ndarray | None = None

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
        self.add_product("up", dinner, x)
        if self.trains("down"):
            self.add_product("down", dy, self.stage.kernels.gelu(inner))
        self.add_rows("up_bias", dinner)
        self.add_rows("down_bias", dy)
