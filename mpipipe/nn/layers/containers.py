"""Layers made of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpipipe.arrays import Array
from mpipipe.nn.layers.layer import Layer


class Sequential(Layer):
    """One layer after the other; between them the stage lets messages advance.

    Parameters
    ----------
    layers : sequence of Layer
        The layers, the first one first. Without any the layer is the identity.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Sequential([nn.Linear(3, 8), nn.Gelu()])])
    >>> stage.forward(np.ones((4, 3), np.float32))[0].shape, list(stage.parameters)
    ((4, 8), ['0.0.weight', '0.0.bias'])
    """

    def __init__(self, layers: Sequence[Layer]):
        self.layers = tuple(layers)
        self.children = {str(i): layer for i, layer in enumerate(self.layers)}
        self._reversed = self.layers[::-1]

    def forward(self, x: Array) -> tuple[Array, Any]:
        saved: list = []
        poll = self.stage.poll
        for layer in self.layers:
            if poll is not None and saved:
                poll()
            x, kept = layer.forward(x)
            saved.append(kept)
        return x, saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Any, Any]:
        pending: list = []
        poll = self.stage.poll
        for layer, kept in zip(self._reversed, reversed(saved)):
            if poll is not None and pending:
                poll()
            dy, waiting = layer.backward_input(dy, kept)
            pending.append(waiting)
        return dy, pending

    def backward_weight(self, pending: Any) -> None:
        poll = self.stage.poll
        last = self._reversed[0] if self._reversed else None
        for layer, waiting in zip(self._reversed, pending):
            if poll is not None and layer is not last:
                poll()
            layer.backward_weight(waiting)

    def backward(self, dy: Array, saved: Any) -> Any:
        poll = self.stage.poll
        last = self._reversed[0] if self._reversed else None
        for layer, kept in zip(self._reversed, reversed(saved)):
            if poll is not None and layer is not last:
                poll()
            dy = layer.backward(dy, kept)
        return dy


class Residual(Layer):
    """y = x + layer(x).

    Parameters
    ----------
    layer : Layer
        A layer whose output has the shape of its input.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Residual(nn.Sequential([nn.RMSNorm(8), nn.SwiGLU(8, 64)]))])
    >>> stage.forward(np.ones((4, 8), np.float32))[0].shape
    (4, 8)
    """

    def __init__(self, layer: Layer):
        self.layer = layer
        self.children = {"layer": layer}

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, saved = self.layer.forward(x)
        return self.stage.kernels.add(x, y), saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, pending = self.layer.backward_input(dy, saved)
        return self.stage.kernels.add(dy, dx), pending

    def backward_weight(self, pending: Any) -> None:
        self.layer.backward_weight(pending)

    def backward(self, dy: Array, saved: Any) -> Array:
        return self.stage.kernels.add(dy, self.layer.backward(dy, saved))
