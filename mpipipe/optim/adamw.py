"""Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.nn import Stage
from mpipipe.optim.sgd import zeros_beside


class AdamW:
    """Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr * weight_decay * p, where the parameter decays; then
    p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). In place, in the dtype of the stage's parameters, with
    the scalars of the bias correction in float64.

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
        self.state = [{"first": zeros_beside(stage), "second": zeros_beside(stage)} for stage in self.stages]

    def step(self, lr: float | None = None, scale: float = 1.0) -> None:
        """Make one step with the gradients of the stages, times `scale`; `lr` overrides the rate for this step."""
        rate = self.lr if lr is None else lr
        self.steps += 1
        b1, b2 = self.betas
        for stage, state in zip(self.stages, self.state):
            for start, stop, decayed in stage.decay_ranges:
                at = slice(start, stop)
                stage.kernels.adamw(
                    stage.parameters.flat[at],
                    stage.gradients.flat[at],
                    state["first"][at],
                    state["second"][at],
                    b1=b1,
                    b2=b2,
                    eps=self.eps,
                    rate=rate,
                    correction1=1 - b1**self.steps,
                    correction2=1 - b2**self.steps,
                    shrink=1 - rate * self.weight_decay if decayed else 1.0,
                    g_scale=scale,
                )
