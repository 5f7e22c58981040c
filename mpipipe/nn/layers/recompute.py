"""Trading time for memory (Chen et al., "Training deep nets with sublinear memory cost", 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpipipe.arrays import Array
from mpipipe.nn.layers.layer import Layer


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
    def leaves_sum(self) -> bool:  # type: ignore[override]  # a plain attribute in other layers
        """Whether the layer leaves a sum."""
        return self.layer.leaves_sum

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, _ = self.layer.forward(x)
        return y, (x, self.stage.position)

    def forward_sum(self, x: Array, more: Array) -> tuple[Array, Array, Any]:
        total, y, _ = self.layer.forward_sum(x, more)
        return total, y, (total, self.stage.position)

    def forward_apart(self, x: Array, more: Array | None) -> tuple[Array, Array, Array | None, Any]:
        total, y, rest, _ = self.layer.forward_apart(x, more)
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
            return self.layer.forward_apart(x, None)[3]
        finally:
            stage.position = now
