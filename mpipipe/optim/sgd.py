"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.nn import Stage
from mpipipe.nn.blocks import blocks


class SGD:
    """p -= lr * u, u = momentum * u + gradient + weight_decay * p.

    Weight decay reaches the parameters whose Parameter.decay is set. Updates are in place, in pieces that stay in
    cache, in the dtype of the stage.

    Attributes
    ----------
    state : for each stage {"momentum": flat array}, or {} without momentum
    steps : how many have been made
    """

    def __init__(self, stages: Sequence[Stage], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        self.stages, self.lr = tuple(stages), lr
        self.momentum, self.weight_decay = momentum, weight_decay
        self.steps = 0
        self.state = [{"momentum": np.zeros_like(s.parameters.flat)} if momentum else {} for s in self.stages]

    def step(self, lr: float | None = None) -> None:
        """Make one step with the gradients of the stages; `lr` overrides the learning rate for this step."""
        rate = self.lr if lr is None else lr
        for stage, state in zip(self.stages, self.state):
            for start, stop, decayed in stage.runs:
                for piece in blocks(stop - start):
                    at = slice(start + piece.start, start + piece.stop)
                    self._update(stage, state, at, self.weight_decay if decayed else 0.0, rate)
        self.steps += 1

    def _update(self, stage, state, at, decay, rate):
        p, update = stage.parameters.flat[at], stage.gradients.flat[at]
        if decay:
            update = update + p * decay
        if state:
            u = state["momentum"][at]
            np.multiply(u, self.momentum, out=u)
            update = np.add(u, update, out=u)
        np.subtract(p, update * rate, out=p)
