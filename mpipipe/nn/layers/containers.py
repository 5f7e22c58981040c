"""Layers made of layers."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.nn.layers.layer import Layer


class Sequential(Layer):
    """One layer after the other. The stage's poll function is called after each of them."""

    def __init__(self, layers: Sequence[Layer]):
        self.layers = tuple(layers)
        self.children = {str(i): layer for i, layer in enumerate(self.layers)}
        self._reversed = self.layers[::-1]

    def forward(self, x):
        saved = []
        poll = self.stage.poll
        for layer in self.layers:
            x, kept = layer.forward(x)
            saved.append(kept)
            if poll is not None:
                poll()
        return x, saved

    def backward_input(self, dy, saved):
        pending = []
        poll = self.stage.poll
        for layer, kept in zip(self._reversed, reversed(saved)):
            dy, waiting = layer.backward_input(dy, kept)
            pending.append(waiting)
            if poll is not None:
                poll()
        return dy, pending

    def backward_weight(self, pending):
        poll = self.stage.poll
        for layer, waiting in zip(self._reversed, pending):
            layer.backward_weight(waiting)
            if poll is not None:
                poll()

    def backward(self, dy, saved):
        poll = self.stage.poll
        for layer, kept in zip(self._reversed, reversed(saved)):
            dy = layer.backward(dy, kept)
            if poll is not None:
                poll()
        return dy


class Residual(Layer):
    """y = x + layer(x)."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.children = {"layer": layer}

    def forward(self, x):
        y, saved = self.layer.forward(x)
        return self.stage.kernels.add(x, y), saved

    def backward_input(self, dy, saved):
        dx, pending = self.layer.backward_input(dy, saved)
        return self.stage.kernels.add(dy, dx), pending

    def backward_weight(self, pending):
        self.layer.backward_weight(pending)

    def backward(self, dy, saved):
        return self.stage.kernels.add(dy, self.layer.backward(dy, saved))
