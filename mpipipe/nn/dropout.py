"""Dropout whose masks do not depend on where or how often they are drawn."""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ArgumentError
from mpipipe.nn import random
from mpipipe.nn.layer import Layer


class Dropout(Layer):
    """While training, zero each element with the given probability and scale the others so that the mean stays.

    The mask is drawn by a counter-based generator for (seed, layer name, step, replica, micro-batch), so recomputation
    draws it again, and so does any other split of the model over ranks. Otherwise the layer is the identity.
    """

    def __init__(self, probability: float):
        if not 0 <= probability < 1:
            raise ArgumentError("wrong dropout probability", found=repr(probability), expected="0 <= probability < 1")
        self.threshold = round(probability * 65536)  # an element lives where 16 random bits reach it
        self.scale = 65536 / (65536 - self.threshold) if self.threshold < 65536 else 0.0

    def bound(self):
        self._stream = random.key("dropout", self.stage.seed, self.name)

    def forward(self, x):
        position = self.stage.position
        if not position.training or self.threshold == 0:
            return x, None
        counter = (position.step, position.replica, position.microbatch)
        keep = random.bits16(self._stream, counter, x.size).reshape(x.shape) >= self.threshold
        return self._apply(x, keep), keep

    def backward_input(self, dy, saved):
        return (dy if saved is None else self._apply(dy, saved)), None

    def _apply(self, x, keep):
        y = np.multiply(x, keep)
        return np.multiply(y, self.scale, out=y)
