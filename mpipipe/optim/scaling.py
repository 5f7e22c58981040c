"""Scaling of the loss, for gradients too small for float16 (Micikevicius et al., "Mixed precision training", 2018).

The loss, and with it every gradient, is multiplied by a scale before the backward; the optimizer divides by it. An
infinite or NaN gradient tells that the scale was too large: the step is left out and the scale made smaller. It grows
after many good steps in a row.

    result = pipeline.step(inputs, targets, scale=scaler.scale)
    norm = optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=mesh.pipe)
"""

from __future__ import annotations

import math
from collections.abc import Collection

from mpipipe.errors import ArgumentError
from mpipipe.optim.clipping import check_max_norm
from mpipipe.optim.norm import measured

SMALLEST, LARGEST = 1.0, 2.0**64  # scale


class LossScaler:
    """The scale of the loss from step to step. It depends on nothing but the outcomes it is told of.

    Parameters
    ----------
    initial : first scale, in 1 ... 2^64
    growth, interval : the scale is multiplied by `growth` after `interval` steps in a row without overflow, up to 2^64
    backoff : it is multiplied by this after an overflow, down to 1
    dynamic : False: it stays what it is; LossScaler(1.0, dynamic=False) is no scaling at all, which bfloat16 needs

    Attributes
    ----------
    scale : for the next step
    good : steps in a row without overflow at this scale
    skipped : steps with overflow so far
    """

    def __init__(
        self,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        dynamic: bool = True,
    ):
        if not (SMALLEST <= initial <= LARGEST and 1 <= growth < math.inf and 0 < backoff < 1 and interval >= 1):
            raise ArgumentError(
                "wrong scaling of the loss",
                found=f"initial={initial}, growth={growth}, backoff={backoff}, interval={interval}",
                expected="1 <= initial <= 2^64, growth >= 1 and finite, 0 < backoff < 1, interval >= 1",
            )
        self.scale, self.growth, self.backoff, self.interval = float(initial), growth, backoff, interval
        self.dynamic = dynamic
        self.good = self.skipped = 0

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be cured by a smaller scale."""
        return self.dynamic and self.scale > SMALLEST

    def update(self, finite: bool) -> None:
        """Take note of a step whose gradients were all finite, or were not."""
        if not finite:
            self.skipped += 1
            self.good = 0
            if self.dynamic:
                self.scale = max(SMALLEST, self.scale * self.backoff)
            return
        self.good += 1
        if self.good == self.interval:
            self.good = 0
            if self.dynamic:
                self.scale = min(LARGEST, self.scale * self.growth)


def scaled_step(
    optimizer,
    scaler: LossScaler,
    max_norm: float = math.inf,
    lr: float | None = None,
    comm=None,
    skip: Collection[str] = (),
) -> float | None:
    """Make a step of the optimizer with gradients that carry `scaler.scale`, and update the scaler; collective.

    Parameters
    ----------
    optimizer : SGD or AdamW
    max_norm : above 0; larger gradients are clipped to it, as by `clip_by_global_norm`, but without a pass of their own
    lr : overrides the learning rate for this step
    comm, skip : as for `gradient_norm`

    Returns the norm of the gradients, without scale and before clipping; None where one of them was infinite or NaN, on
    whichever rank: then no rank makes the step. The gradients stay as they are.

    Raises NonFiniteError on all ranks, naming rank, stage and parameter, where that happens and no smaller scale can
    help: the scale is 1 already, or not dynamic.
    """
    check_max_norm(max_norm)
    norm, culprit = measured(optimizer.stages, comm, skip, scaler.scale)
    if culprit is not None and not scaler.can_shrink:
        raise culprit.error()
    clipping = max_norm / norm if norm > max_norm else 1.0
    factor = clipping / scaler.scale
    scaler.update(culprit is None)
    if culprit is not None:
        return None
    optimizer.step(lr=lr, scale=factor)
    return norm
