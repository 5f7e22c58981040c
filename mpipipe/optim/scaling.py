"""Scaling of the loss, for gradients too small for float16 (Micikevicius et al., "Mixed precision training", 2018).

The loss, and with it every gradient, is multiplied by a scale before the backward; the optimizer divides by it. An
infinite or NaN gradient tells that the scale was too large: the step is left out and the scale made smaller. It grows
after many good steps in a row.

    result = pipeline.step(inputs, targets, scale=scaler.scale)
    norm = optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=mesh.pipe)
"""

from __future__ import annotations

import math

from mpipipe.errors import ArgumentError

SMALLEST, LARGEST = 1.0, 2.0**64  # scale


class LossScaler:
    """The scale of the loss from step to step. It depends on nothing but the outcomes that `update` gets.

    Parameters
    ----------
    initial : float
        First scale, in 1 ... 2^64.
    growth : float
        At least 1: the scale is multiplied by it after `interval` steps in a row without overflow, up to 2^64.
    backoff : float
        Between 0 and 1: the scale is multiplied by it after an overflow, down to 1.
    interval : int
        At least 1.
    dynamic : bool
        False: the scale stays what it is. `LossScaler(1.0, dynamic=False)` is no scaling at all, which is enough for
        bfloat16.

    Attributes
    ----------
    scale : float
        The scale for the next step.
    good, skipped : int
        Steps in a row without overflow at this scale, and steps with overflow so far.

    Examples
    --------
    >>> from mpipipe import optim
    >>> scaler = optim.LossScaler(initial=1024.0)
    >>> scaler.update(finite=False)
    >>> scaler.scale, scaler.skipped
    (512.0, 1)
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
        """Whether a smaller scale may cure an overflow."""
        return self.dynamic and self.scale > SMALLEST

    def update(self, finite: bool) -> None:
        """Take note of a step.

        Parameters
        ----------
        finite : bool
            Whether all gradients of the step were finite.
        """
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
