"""Learning-rate curves."""

from __future__ import annotations

import math

from mpipipe.errors import ArgumentError


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Learning rate of `step` (0 ... steps - 1): a line up to `peak` over `warmup` steps, then half a cosine down.

    Step warmup - 1 has the rate `peak`, the last step has floor * peak, and so has every later one (Loshchilov and
    Hutter, "SGDR", 2017, without restarts).
    """
    if steps < 1 or not 0 <= warmup <= steps or step < 0:
        raise ArgumentError(
            "wrong learning-rate curve",
            found=f"step={step}, steps={steps}, warmup={warmup}",
            expected="step >= 0, steps >= 1, 0 <= warmup <= steps",
        )
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step + 1 - warmup) / (steps - warmup)) if steps > warmup else 1.0
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
