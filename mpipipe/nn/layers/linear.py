"""The linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.nn.checks import check_features, check_positive
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.layers.weight_gradients import Projection
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
    replaced: tuple[str, ...] = ("weight", "bias")
    freezes_parts = True

    weight: np.ndarray
    weight_grad: np.ndarray
    bias: np.ndarray | None = None
    bias_grad: np.ndarray | None = None

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
        self.add_product("weight", dy, x)
        self.add_rows("bias", dy)
