"""Host functions of float32 arrays take half precision too: they upcast once and round once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from mpipipe.arrays.dtypes import FLOAT32, Array, is_half
from mpipipe.arrays.memory import aligned_empty

Function = TypeVar("Function", bound=Callable[..., Any])


def upcast_halves(
    function: Function, returned: tuple[int, ...] = (), written: tuple[int, ...] = ()
) -> Function:
    """Let a function of host arrays take half precision.

    Where its first argument is of a half dtype, the function sees each half array as a float32 one.
    A value too large for float16 becomes infinite without a warning: scaling of the loss looks for
    it. `returned` says which results are rounded to that dtype, `written` which positional
    arguments it sets, and never adds to.
    """

    @wraps(function)
    def run(*values: Any, **kwargs: Any) -> Any:
        dtype = values[0].dtype
        if dtype.itemsize != 2:
            return function(*values, **kwargs)
        with np.errstate(over="ignore", invalid="ignore"):
            seen = [float32_like(x) if i in written else upcast(x) for i, x in enumerate(values)]
            results = function(*seen, **kwargs)
            for i in written:
                round_into(values[i], seen[i])
            if isinstance(results, tuple):
                rounded_once = list(results)
                for i in returned:
                    rounded_once[i] = rounded(results[i], dtype)
                results = tuple(rounded_once)
            elif returned:
                results = rounded(results, dtype)
        return results

    return cast(Function, run)


def upcast(x: Array) -> Array:
    """Return a host array of halves as float32, and anything else as it is."""
    if _is_half_array(x):
        return x.astype(FLOAT32)
    return x


def float32_like(target: Array) -> Array:
    """Return float32 memory for a host array of halves, and anything else as it is."""
    if _is_half_array(target):
        return aligned_empty(target.shape, FLOAT32)
    return target


def round_into(target: Array, values: Array) -> None:
    """Set `target` from what `float32_like` returned for it."""
    if values is not target:
        round_to(target, values)


def rounded(values: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Return a float32 array as one of halves."""
    target = aligned_empty(values.shape, kind)
    round_to(target, values)
    return target


def round_to(target: np.ndarray, values: np.ndarray) -> None:
    """Set halves from a float32 array: to nearest even, infinity where it is too large."""
    faster = faster_rounding.get(target.dtype)
    if faster is None:
        target[...] = values
    else:
        faster(target, values)


# dtype -> what rounds to it in the same bits in less time than numpy, where a library for it is
# used anyway
faster_rounding: dict[np.dtype, Callable[[np.ndarray, np.ndarray], object]] = {}


def _is_half_array(x: object) -> bool:
    return isinstance(x, np.ndarray) and is_half(x.dtype)
