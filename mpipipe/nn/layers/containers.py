"""Layers made of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpipipe.arrays import Array
from mpipipe.nn.layers.layer import Layer, Pending, Position, Saved, WithPending, WithSaved
from mpipipe.nn.layers.norm import LayerNorm, RMSNorm


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

    recordable = True
    mixes_positions = False
    # Set by the stage: layers before it have no backward, for nobody asks for a gradient there.
    lowest = 0
    # With which arguments `Stage.end_backward` has set that.
    asked: tuple[bool, bool] | None = None
    # Set by `PreNormResidual`: the norm at the beginning adds the gradient of the output.
    norm_adds = False

    def __init__(self, layers: Sequence[Layer]):
        self.layers = tuple(layers)
        self.children = {str(i): layer for i, layer in enumerate(self.layers)}

    def forward(self, x: Array) -> WithSaved:
        poll = self.stage.poll
        lowest = self.lowest
        saved: list[Saved] = []
        for place, layer in enumerate(self.layers):
            if place and poll is not None:
                poll()
            x, of_layer = layer.forward(x)
            saved.append(of_layer if place >= lowest else None)
        return x, saved

    def backward_input(self, dy: Array, saved: Saved, whole: bool = False) -> WithPending:
        """Compute the gradient of the input from that of the output.

        Parameters
        ----------
        dy, saved : array, object
            As for all layers.
        whole : bool
            Whether layers do their whole backward at once.

        Returns
        -------
        dx, pending : array or None, object
            As for all layers; nothing is pending after a whole backward.
        """
        poll = self.stage.poll
        pending: list = []
        dy_of_all = dy
        last = len(self.layers) - 1
        for place in range(last, self.lowest - 1, -1):
            if place < last and poll is not None:
                poll()
            layer = self.layers[place]
            more: tuple[Array, ...] = ()
            if self.norm_adds and not place:
                more = (dy_of_all,)
            if whole and not layer.frozen:
                dy = layer.backward(dy, saved[place], *more)
            else:
                dy, waiting = layer.backward_input(dy, saved[place], *more)
                pending.append(None if layer.frozen else waiting)
        return None if self.lowest else dy, pending

    def backward_weight(self, pending: Pending) -> None:
        poll = self.stage.poll
        last = len(self.layers) - 1
        for number, waiting in enumerate(pending):
            if number and poll is not None:
                poll()
            layer = self.layers[last - number]
            if not layer.frozen:
                layer.backward_weight(waiting)

    def backward(self, dy: Array, saved: Saved) -> Array:
        return self.backward_input(dy, saved, True)[0]


class Residual(Layer):
    """y = x + layer(x). Where the layer begins with a norm, `PreNormResidual` is faster on a GPU.

    Parameters
    ----------
    layer : Layer
        A layer whose output has the shape of its input.
    """

    recordable = True
    mixes_positions = False

    def __init__(self, layer: Layer):
        self.layer = layer
        self.children = {"layer": layer}

    def forward(self, x: Array) -> WithSaved:
        y, saved = self.layer.forward(x)
        return self.stage.kernels.add(x, y), saved

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        dx, pending = self.layer.backward_input(dy, saved)
        return self._added(dy, dx), pending

    def backward_weight(self, pending: Pending) -> None:
        self.layer.backward_weight(pending)

    def backward(self, dy: Array, saved: Saved) -> Array:
        return self._added(dy, self.layer.backward(dy, saved))

    def _added(self, dy: Array, dx: Array) -> Array:
        return self.stage.kernels.add(dy, dx)


class PreNormResidual(Residual):
    """y = x + f(norm(x)), where f is layers one after the other.

    In the backward one kernel normalises and adds. The bits are those of `Residual`. Parameters are
    named as those of ``Residual(Sequential([norm, *layers]))``, such as "3.layer.0.gain".

    Parameters
    ----------
    norm : Layer
        An RMSNorm, a LayerNorm, or a layer of your own.
    *layers : Layer
        Those of f; the shape of the last output is that of x.
    """

    recordable = True
    mixes_positions = False

    def __init__(self, norm: Layer, *layers: Layer):
        chain = Sequential([norm, *layers])
        super().__init__(chain)
        # A class that is derived from one of these may have a backward of its own.
        chain.norm_adds = self.norm_adds = type(norm) in (RMSNorm, LayerNorm)

    def _added(self, dy: Array, dx: Array) -> Array:
        if self.norm_adds:
            return dx
        return super()._added(dy, dx)


# -- Trading time for memory (Chen et al., "Training deep nets with sublinear memory cost", 2016) --


class Recompute(Layer):
    """A layer that keeps only its input: the backward runs the forward again.

    Dropout masks are the same.

    It adds nothing to names, so parameters, their initial values and masks are those of the layer
    without it.

    Parameters
    ----------
    layer : Layer
        The layer to run.
    """

    recordable = True
    mixes_positions = False

    def __init__(self, layer: Layer):
        self.layer = layer

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        yield name, self
        yield from self.layer.walk(name)

    def forward(self, x: Array) -> WithSaved:
        y, _ = self.layer.forward(x)
        return y, (x, self.stage.position)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return self.layer.backward_input(dy, self._again(*saved))

    def backward_weight(self, pending: Pending) -> None:
        self.layer.backward_weight(pending)

    def backward(self, dy: Array, saved: Saved) -> Array:
        return self.layer.backward(dy, self._again(*saved))

    def _again(self, x: Array, position: Position) -> Any:
        """Return what the layer saves at the position of the first forward."""
        stage = self.stage
        now = self.stage.position
        stage.position = position
        try:
            return self.layer.forward(x)[1]
        finally:
            stage.position = now
