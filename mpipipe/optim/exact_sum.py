"""Exact sums of floating-point numbers, as few numbers that others can go on adding to.

A sum of doubles is in general no double, but it is the sum of a few: its value rounded, what rounding has left out,
rounded, and so on (an expansion; Shewchuk, "Adaptive precision floating-point arithmetic", 1997). `math.fsum` over
these and those of other ranks rounds once, to the same bits as over all numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def expansion(numbers: Iterable[float]) -> list[float]:
    """Return few numbers, of falling size, whose exact sum is that of the given ones.

    Examples
    --------
    >>> from mpipipe.optim.exact_sum import expansion
    >>> expansion([1e16, 1.0, 1.0])
    [1.0000000000000002e+16]
    >>> expansion([1e16, 1.0])
    [1e+16, 1.0]
    """
    left, parts = list(numbers), []
    while total := math.fsum(left):
        parts.append(total)
        left.append(-total)
    return parts
