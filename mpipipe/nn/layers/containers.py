"""Layers made of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    recordable = True
    lowest = 0  # layers before it have no backward: nothing in them is trained, and nobody asks for their gradient
    on_layer_done: Callable[[Layer], object] | None = (
        None  # told of each layer that has added its part to the gradients
    )

    def __init__(self, layers: Sequence[Layer]):
        self.layers = tuple(layers)
        self.children = {str(i): layer for i, layer in enumerate(self.layers)}
        self._reversed = self.layers[::-1]

    def end_backward_at(self, place: int) -> None:
        """Let backwards end with the layer at this place, without a gradient of the input.

        Parameters
        ----------
        place : int
            0 for all layers, with a gradient of the input.
        """
        self.lowest = place
        self._reversed = self.layers[place:][::-1]

    @property
    def defers_add(self) -> bool:  # type: ignore[override]  # a plain attribute in other layers
        """Whether the last layer leaves a sum."""
        return bool(self.layers) and self.layers[-1].defers_add

    def forward(self, x: Array) -> tuple[Array, Any]:
        saved: list = []
        return self._rest(x, None, saved, apart=False)[0], saved

    def forward_sum(self, x: Array, more: Array) -> tuple[Array, Array, Any]:
        if not self.layers:
            return super().forward_sum(x, more)
        total, y, rest, kept = self._first(x, more, apart=False)
        saved = [kept]
        return total, self._rest(y, rest, saved, apart=False)[0], saved

    def forward_unadded(self, x: Array, more: Array | None) -> tuple[Array, Array, Array | None, Any]:
        if not self.layers:
            return super().forward_unadded(x, more)
        total, y, rest, kept = self._first(x, more, apart=True)
        saved = [kept]
        return (total, *self._rest(y, rest, saved, apart=True), saved)

    def _first(self, x: Array, more: Array | None, apart: bool) -> tuple[Array, Array, Array | None, Any]:
        """Run the first layer alone."""
        first = self.layers[0]
        if more is None or (first.defers_add and (apart or len(self.layers) > 1)):
            return first.forward_unadded(x, more)
        total, y, kept = first.forward_sum(x, more)
        return total, y, None, kept

    def _rest(self, x: Array, more: Array | None, saved: list, apart: bool) -> tuple[Array, Array | None]:
        """Run the layers behind those that have `saved`, on x + more; leave a sum at the end only if `apart`."""
        poll, count = self.stage.poll, len(self.layers)
        for place in range(len(saved), count):
            layer = self.layers[place]
            if poll is not None and saved:
                poll()
            if layer.defers_add and (apart or place < count - 1):
                _, x, more, kept = layer.forward_unadded(x, more)
            elif more is None:
                x, kept = layer.forward(x)
            else:
                _, x, kept = layer.forward_sum(x, more)
                more = None
            saved.append(kept if place >= self.lowest else None)
        return x, more

    def backward_input(self, dy: Array, saved: Any) -> tuple[Any, Any]:
        return self._backward_input(dy, saved, None)

    def backward_input_add(self, dy: Array, saved: Any, more: Array) -> tuple[Array, Any]:
        return self._backward_input(dy, saved, more) if self.layers else super().backward_input_add(dy, saved, more)

    def _backward_input(self, dy: Array, saved: Any, more: Array | None) -> tuple[Any, Any]:
        pending: list = []
        poll = self.stage.poll
        last = self._reversed[-1] if more is not None else None
        for layer, kept in zip(self._reversed, reversed(saved)):
            if poll is not None and pending:
                poll()
            if layer is last and more is not None:
                dy, waiting = layer.backward_input_add(dy, kept, more)
            else:
                dy, waiting = layer.backward_input(dy, kept)
            pending.append(None if layer.frozen else waiting)
        return None if self.lowest else dy, pending

    def backward_weight(self, pending: Any) -> None:
        poll, done = self.stage.poll, self.on_layer_done
        last = self._reversed[0] if self._reversed else None
        for layer, waiting in zip(self._reversed, pending):
            if poll is not None and layer is not last:
                poll()
            if not layer.frozen:
                layer.backward_weight(waiting)
            if done is not None:
                done(layer)

    def backward(self, dy: Array, saved: Any) -> Any:
        return self._backward(dy, saved, None)

    def backward_add(self, dy: Array, saved: Any, more: Array) -> Array:
        return self._backward(dy, saved, more) if self.layers else super().backward_add(dy, saved, more)

    def _backward(self, dy: Array, saved: Any, more: Array | None) -> Any:
        poll, done = self.stage.poll, self.on_layer_done
        start = self._reversed[0] if self._reversed else None
        last = self._reversed[-1] if more is not None else None
        for layer, kept in zip(self._reversed, reversed(saved)):
            if poll is not None and layer is not start:
                poll()
            if layer.frozen:
                adds = layer is last and more is not None
                dy, _ = layer.backward_input_add(dy, kept, more) if adds else layer.backward_input(dy, kept)
            elif layer is last and more is not None:
                dy = layer.backward_add(dy, kept, more)
            else:
                dy = layer.backward(dy, kept)
            if done is not None:
                done(layer)
        return None if self.lowest else dy


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

    recordable = True
    defers_add = True

    def __init__(self, layer: Layer):
        self.layer = layer
        self.children = {"layer": layer}

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, saved = self.layer.forward(x)
        return self.stage.kernels.add(x, y), saved

    def forward_sum(self, x: Array, more: Array) -> tuple[Array, Array, Any]:
        total, y, saved = self.layer.forward_sum(x, more)
        return total, self.stage.kernels.add(total, y), saved

    def forward_unadded(self, x: Array, more: Array | None) -> tuple[Array, Array, Array | None, Any]:
        if more is None:
            y, saved = self.layer.forward(x)
            return x, x, y, saved
        total, y, saved = self.layer.forward_sum(x, more)
        return total, total, y, saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.layer.backward_input_add(dy, saved, dy)

    def backward_weight(self, pending: Any) -> None:
        self.layer.backward_weight(pending)

    def backward(self, dy: Array, saved: Any) -> Array:
        return self.layer.backward_add(dy, saved, dy)


# -- Trading time for memory (Chen et al., "Training deep nets with sublinear memory cost", 2016) ---------------------


class Recompute(Layer):
    """The layer it is given, keeping only the input: the backward runs the forward again, with the same dropout masks.

    It adds nothing to names, so parameters, their initial values and masks are those of the layer without it.

    Parameters
    ----------
    layer : Layer
        The layer to run.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Recompute(nn.Linear(3, 2))])
    >>> sorted(stage.parameters)
    ['0.bias', '0.weight']
    >>> y, saved = stage.forward(np.ones((4, 3), np.float32))
    >>> stage.backward(np.ones_like(y), saved).shape
    (4, 3)
    """

    recordable = True

    def __init__(self, layer: Layer):
        self.layer = layer

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        yield name, self
        yield from self.layer.walk(name)

    @property
    def defers_add(self) -> bool:  # type: ignore[override]  # a plain attribute in other layers
        """Whether the layer leaves a sum."""
        return self.layer.defers_add

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, _ = self.layer.forward(x)
        return y, (x, self.stage.position)

    def forward_sum(self, x: Array, more: Array) -> tuple[Array, Array, Any]:
        total, y, _ = self.layer.forward_sum(x, more)
        return total, y, (total, self.stage.position)

    def forward_unadded(self, x: Array, more: Array | None) -> tuple[Array, Array, Array | None, Any]:
        total, y, rest, _ = self.layer.forward_unadded(x, more)
        return total, y, rest, (total, self.stage.position)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.layer.backward_input(dy, self._again(saved))

    def backward_input_add(self, dy: Array, saved: Any, more: Array) -> tuple[Array, Any]:
        return self.layer.backward_input_add(dy, self._again(saved), more)

    def backward_weight(self, pending: Any) -> None:
        self.layer.backward_weight(pending)

    def backward(self, dy: Array, saved: Any) -> Array:
        return self.layer.backward(dy, self._again(saved))

    def backward_add(self, dy: Array, saved: Any, more: Array) -> Array:
        return self.layer.backward_add(dy, self._again(saved), more)

    def _again(self, saved: Any) -> Any:
        """Return what the layer saves at the position of the first forward; the stage's position is restored.

        Nobody reads the output, so a sum in it is left alone.
        """
        x, position = saved
        stage, now = self.stage, self.stage.position
        stage.position = position
        try:
            return self.layer.forward_unadded(x, None)[3]
        finally:
            stage.position = now
