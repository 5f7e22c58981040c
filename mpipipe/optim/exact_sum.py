"""Exact sums of floating-point numbers, as few numbers that others can go on adding to.

A sum of doubles is in general no double, but it is the sum of a few that do not overlap in their digits (Shewchuk,
"Adaptive precision floating-point arithmetic", 1997, theorem 10). `math.fsum` over these, and those of other ranks,
rounds once: to the same bits as over all numbers.
"""

from __future__ import annotations

from collections.abc import Iterable


def expansion(numbers: Iterable[float]) -> list[float]:
    """Return numbers that do not overlap, of rising size, whose exact sum is that of the given ones.

    Examples
    --------
    >>> from mpipipe.optim.exact_sum import expansion
    >>> expansion([1e16, 1.0, 1.0])
    [1.0000000000000002e+16]
    >>> expansion([1e16, 1.0])
    [1.0, 1e+16]
    """
    parts: list[float] = []
    for number in numbers:
        grown, high = [], number
        for part in parts:
            small, large = sorted((high, part), key=abs)
            high = large + small
            low = small - (high - large)
            if low:
                grown.append(low)
        if high:
            grown.append(high)
        parts = grown
    return parts
