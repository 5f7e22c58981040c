"""Dropout whose masks do not depend on where or how often they are drawn."""

from __future__ import annotations

from typing import Any

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn import random
from mpipipe.nn.layers.layer import Layer


class Dropout(Layer):
    """While training, zero each element with the given probability and scale the others so that the mean stays.

    The mask is drawn by a counter-based generator for (seed, layer name, step, replica, micro-batch), so recomputation
    draws it again, and so does any other split of the model over ranks. Otherwise the layer is the identity.

    Parameters
    ----------
    probability : float
        At least 0 and below 1; rounded to a multiple of 2^-16.

    Raises
    ------
    ArgumentError
        The probability is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Dropout(0.5)])
    >>> x = np.ones((4, 8), np.float32)
    >>> y, saved = stage.forward(x, nn.Position(step=3))
    >>> sorted(set(y.ravel().tolist()))
    [0.0, 2.0]
    >>> again, _ = stage.forward(x, nn.Position(step=3))
    >>> bool((again == y).all())
    True
    >>> identity, _ = stage.forward(x, nn.Position(training=False))
    >>> bool((identity == x).all())
    True
    """

    takes_integers = False
    recordable = True

    def __init__(self, probability: float):
        if not 0 <= probability < 1:
            raise ArgumentError("wrong dropout probability", found=repr(probability), expected="0 <= probability < 1")
        self.threshold = round(probability * 65536)  # an element lives where 16 random bits reach it
        self.scale = 65536 / (65536 - self.threshold) if self.threshold < 65536 else 0.0

    def unrecordable(self) -> str:
        return "it draws another mask for each micro-batch" if self.threshold else ""

    def bound(self) -> None:
        self._stream = random.key("dropout", self.stage.seed, self.name)

    def forward(self, x: Array) -> tuple[Array, Any]:
        position = self.stage.position
        if not position.training or self.threshold == 0:
            return x, None
        counter = (position.step, position.replica, position.microbatch)
        return self.stage.kernels.dropout(x, self._stream, counter, self.threshold, self.scale)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return (dy if saved is None else self.stage.kernels.dropout_backward(dy, saved, self.scale)), None
