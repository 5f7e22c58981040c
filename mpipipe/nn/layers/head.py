"""The head of a language model: the product that makes logits, which a loss can take over."""

from __future__ import annotations

from typing import Any

from mpipipe.arrays import Array
from mpipipe.nn.layers.linear import Linear
from mpipipe.nn.layers.weight_gradients import Projection


class Head(Linear):
    """Logits = x W^T over the last axis of x, without a bias: a `Linear`, whose product a loss can make itself.

    It is the last layer of a model. A `HeadCrossEntropy` that was made for its stage takes over the product in the
    calls of a pipeline that have a loss: there the layer passes x on as it is, and the gradient of x comes back.
    Everywhere else it gives logits.

    Parameters
    ----------
    inputs, outputs : int
        Width of the model and size of the vocabulary. The parameter `weight` is (outputs, inputs).
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
    >>> stage = nn.Stage([nn.Head(8, 256)])
    >>> stage.forward(np.ones((2, 5, 8), np.float32))[0].shape
    (2, 5, 256)
    """

    recordable = True
    replaced = ("weight",)
    freezes_parts = True

    def __init__(self, inputs: int, outputs: int, tie: str | None = None, gain: float = 1.0):
        super().__init__(inputs, outputs, bias=False, tie=tie, gain=gain)

    def projections(self) -> dict[str, Projection]:
        return {}  # a loss may make the product

    def forward(self, x: Array) -> tuple[Array, Any]:
        return (x, None) if self.stage.headless else super().forward(x)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return (dy, None) if saved is None else super().backward_input(dy, saved)

    def backward_weight(self, pending: Any) -> None:
        if pending is not None:
            super().backward_weight(pending)
