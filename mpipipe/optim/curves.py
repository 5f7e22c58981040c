"""Learning-rate curves."""

from __future__ import annotations

import math

from mpipipe.errors import ArgumentError


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Return the learning rate of a step: a line up to `peak`, then half a cosine down.

    Loshchilov and Hutter, "SGDR" (2017), without restarts.

    Parameters
    ----------
    step : int
        The step, 0 ... steps - 1; every later one has the rate of the last.
    steps : int
        Number of steps.
    peak : float
        The rate of step warmup - 1.
    warmup : int
        Number of steps of the line.
    floor : float
        The rate of the last step, as a fraction of `peak`.

    Returns
    -------
    float
        The learning rate.

    Raises
    ------
    ArgumentError
        `step` or `warmup` is negative, `steps` is below 1, or `warmup` above `steps`.

    Examples
    --------
    >>> from mpipipe import optim
    >>> [round(optim.warmup_cosine(step, 6, peak=1.0, warmup=2), 3) for step in range(6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
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
