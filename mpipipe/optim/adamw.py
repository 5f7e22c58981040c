"""Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpipipe.nn import Stage
from mpipipe.nn.blocks import blocks


class AdamW:
    """Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr * weight_decay * p, where the parameter decays; then
    p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). In the dtype of the stage, with the scalars of the bias
    correction in float64; in place, in pieces that stay in cache.

    Attributes
    ----------
    state : for each stage {"first": flat array m, "second": flat array v}
    steps : how many have been made (t)
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ):
        self.stages, self.lr, self.betas, self.eps, self.weight_decay = tuple(stages), lr, betas, eps, weight_decay
        self.steps = 0
        self.state = [
            {"first": np.zeros_like(s.parameters.flat), "second": np.zeros_like(s.parameters.flat)} for s in self.stages
        ]

    def step(self, lr: float | None = None) -> None:
        """Make one step with the gradients of the stages; `lr` overrides the learning rate for this step."""
        rate = self.lr if lr is None else lr
        self.steps += 1
        for stage, state in zip(self.stages, self.state):
            for start, stop, decayed in stage.runs:
                shrink = 1 - rate * self.weight_decay if decayed else 1.0
                for piece in blocks(stop - start):
                    at = slice(start + piece.start, start + piece.stop)
                    p, g = stage.parameters.flat[at], stage.gradients.flat[at]
                    self._update(p, g, state["first"][at], state["second"][at], rate, shrink)

    def _update(self, p, g, m, v, rate, shrink):
        b1, b2 = self.betas
        work = np.multiply(g, 1 - b1)
        np.multiply(m, b1, out=m)
        np.add(m, work, out=m)
        np.multiply(g, g, out=work)
        np.multiply(work, 1 - b2, out=work)
        np.multiply(v, b2, out=v)
        np.add(v, work, out=v)
        np.sqrt(v, out=work)
        np.multiply(work, 1 / math.sqrt(1 - b2**self.steps), out=work)
        np.add(work, self.eps, out=work)
        np.divide(m, work, out=work)
        np.multiply(work, rate / (1 - b1**self.steps), out=work)
        if shrink != 1:
            np.multiply(p, shrink, out=p)
        np.subtract(p, work, out=p)
