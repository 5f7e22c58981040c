"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe import arrays
from mpipipe.nn import Stage


class SGD:
    """p -= lr * u, u = momentum * u + gradient + weight_decay * p.

    Weight decay reaches the parameters whose Parameter.decay is set. Updates are in place, in the dtype of the stage's
    parameters.

    Attributes
    ----------
    state : for each stage {"momentum": flat array}, or {} without momentum
    steps : how many have been made
    """

    def __init__(self, stages: Sequence[Stage], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        self.stages, self.lr = tuple(stages), lr
        self.momentum, self.weight_decay = momentum, weight_decay
        self.steps = 0
        self.state = [{"momentum": zeros_beside(stage)} if momentum else {} for stage in self.stages]

    def step(self, lr: float | None = None, scale: float = 1.0) -> None:
        """Make one step with the gradients of the stages, times `scale`; `lr` overrides the rate for this step."""
        rate = self.lr if lr is None else lr
        for stage, state in zip(self.stages, self.state):
            for start, stop, decayed in stage.decay_ranges:
                at = slice(start, stop)
                stage.kernels.sgd(
                    stage.parameters.flat[at],
                    stage.gradients.flat[at],
                    state["momentum"][at] if state else None,
                    momentum=self.momentum,
                    decay=self.weight_decay if decayed else 0.0,
                    rate=rate,
                    g_scale=scale,
                )
        self.steps += 1


def zeros_beside(stage: Stage):
    """A buffer of zeros like that of the stage's parameters, on its device."""
    return arrays.zeros(stage.parameters.flat.size, stage.parameters.flat.dtype, stage.device)
