"""The linear layer, and the matrix product that adds to a gradient."""

from __future__ import annotations

import numpy as np

from mpipipe.nn.layer import Layer, check_features, check_positive
from mpipipe.nn.parameters import Parameter, normal, zeros

_PIECE = 1 << 17  # elements of one piece of a weight gradient: half a MiB of float32, added while in cache


class Linear(Layer):
    """y = x W^T + b over the last axis of x.

    Parameters
    ----------
    inputs, outputs : sizes; the weight is stored (outputs, inputs)
    bias : whether there is a b, of zeros at the start
    tie : key of Parameter.tie for the weight
    gain : the weight starts normal with standard deviation gain / sqrt(inputs)
    """

    weight: np.ndarray
    weight_grad: np.ndarray
    bias: np.ndarray
    bias_grad: np.ndarray

    def __init__(self, inputs: int, outputs: int, bias: bool = True, tie: str | None = None, gain: float = 1.0):
        check_positive(inputs=inputs, outputs=outputs)
        self.inputs, self.outputs = inputs, outputs
        self.has_bias = bias
        self.declared = {"weight": Parameter((outputs, inputs), normal(gain * inputs**-0.5), tie=tie)}
        if bias:
            self.declared["bias"] = Parameter((outputs,), zeros, decay=False)

    def bound(self):
        self._transposed = self.weight.T

    def forward(self, x):
        if x.ndim != 2:
            check_features(self, x, self.inputs)
            y, saved = self.forward(x.reshape(-1, self.inputs))
            return y.reshape(*x.shape[:-1], self.outputs), saved
        try:
            y = np.matmul(x, self._transposed)
        except ValueError:
            check_features(self, x, self.inputs)
            raise
        if self.has_bias:
            np.add(y, self.bias, out=y)
        return y, x

    def backward_input(self, dy, saved):
        if dy.ndim != 2:
            shape = (*dy.shape[:-1], self.inputs)
            dy = dy.reshape(-1, self.outputs)
            return np.matmul(dy, self.weight).reshape(shape), (dy, saved)
        return np.matmul(dy, self.weight), (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        add_product(self.weight_grad, dy, x)
        if self.has_bias:
            grad = self.bias_grad
            np.add(grad, np.add.reduce(dy, 0), out=grad)


def add_product(grad: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
    """grad += dy^T x, with dy (rows, outputs), x (rows, inputs), grad (outputs, inputs).

    A large product is made in pieces of the gradient, each added while it is still in cache.
    """
    outputs, inputs = grad.shape
    if outputs * inputs <= _PIECE:
        np.add(grad, np.matmul(dy.T, x), out=grad)
        return
    step = max(16, _PIECE // inputs)
    piece = np.empty((step, inputs), grad.dtype)
    for start in range(0, outputs, step):
        part = grad[start : start + step]
        product = np.matmul(dy[:, start : start + step].T, x, out=piece[: len(part)])
        np.add(part, product, out=part)
