"""Casts, copies and sums of arrays with any strides, on the host or on a GPU."""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import Array, strided


def cast(x: Array, dtype: np.dtype) -> Array:
    """Return x itself if it is of this dtype, else a C-contiguous copy that is."""
    if x.dtype == dtype:
        return x
    if isinstance(x, np.ndarray):
        return x.astype(dtype)
    return strided.copied(x, dtype)


def strided_copy(target: Array, source: Array) -> None:
    """Target = source: equal shapes, on one device."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        strided.strided_copy(source, target)


def strided_add(target: Array, source: Array) -> None:
    """Target += source: equal shapes, on one device."""
    if isinstance(target, np.ndarray):
        np.add(target, source, out=target)
    else:
        strided.strided_copy(source, target, add=True)


def fill(x: Array, value: float) -> None:
    """Set all elements of a C-contiguous array."""
    if isinstance(x, np.ndarray):
        x.fill(value)
    else:
        strided.fill(x, value)
