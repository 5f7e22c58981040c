"""Numbers that are added to scores: a function of the positions of queries and keys, evaluated tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.errors import ArgumentError

BiasFunction: TypeAlias = Callable[[np.ndarray, np.ndarray], ArrayLike]


class Bias(NamedTuple):
    """What is added to the scaled scores of a block of keys."""

    function: BiasFunction
    queries: np.ndarray  # the position of each row
    keys: np.ndarray  # and of each key


def evaluated(
    function: BiasFunction, heads: int, queries: np.ndarray, keys: np.ndarray, dtype: np.dtype | None = None
) -> np.ndarray:
    """Return the bias (heads, queries, keys) of positions (queries, 1) and (keys,), a view where axes are repeated."""
    numbers = np.asarray(function(queries, keys))
    wanted = heads, len(queries), len(keys)
    try:
        if numbers.dtype.kind in "iuf":
            return np.broadcast_to(numbers if dtype is None else numbers.astype(dtype, copy=False), wanted)
    except ValueError:
        pass
    raise ArgumentError(
        f"the bias {name_of(function)} does not fit the scores",
        found=f"{numbers.dtype}{list(numbers.shape)}",
        expected=f"real numbers that broadcast to (heads, queries, keys) = {wanted}",
        remedy="the function is given positions (queries, 1) and (keys,)",
    )


def of_heads(function: BiasFunction | None, whole: int, heads: range) -> BiasFunction | None:
    """Return the bias of some of a `whole` of heads."""
    if function is None:
        return None
    return lambda queries, keys: evaluated(function, whole, queries, keys)[heads.start : heads.stop]


def name_of(function: object) -> str | None:
    """Return what a bias is called, the same on all ranks; raises ArgumentError where it cannot be called."""
    if function is not None and not callable(function):
        expected = "None, or a function of the positions of queries and keys, such as attention.alibi(heads)"
        raise ArgumentError("bias of attention", found=repr(function)[:80], expected=expected)
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def alibi(heads: int) -> BiasFunction:
    """Make the bias ``-slope * abs(query - key)`` of Press, Smith and Lewis, "Train short, test long" (ICLR 2022).

    Slopes of n `heads` of queries, a power of 2, are 2^(-8 i / n), i = 1 ... n. For another number they are those of
    the power of 2 below it, then every second of the power above it, as in `get_slopes` of the authors' code.
    It is a `bias` for `Local`, `Ring`, `Ulysses` or `Cached`, and symmetric without a causal mask. ArgumentError is
    raised for other than a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.attention import alibi
    >>> alibi(2)(np.array([[5]]), np.array([3, 4])).tolist()
    [[[-0.125, -0.0625]], [[-0.0078125, -0.00390625]]]
    """
    if not isinstance(heads, (int, np.integer)) or heads < 1:
        raise ArgumentError("heads of alibi", found=repr(heads), expected="an integer of at least 1")
    below = 1 << (int(heads).bit_length() - 1)
    powers = [8 * i / below for i in range(1, below + 1)] + [4 * i / below for i in range(1, 2 * (heads - below), 2)]
    slopes = 2.0 ** -np.array(powers)[:, None, None]
    return lambda queries, keys: slopes * -np.abs(queries - keys)
