"""Casts, copies and sums of arrays with any strides, on the host or on a GPU."""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import Array, is_device, strided


def cast(x: Array, dtype: np.dtype) -> Array:
    """Return x itself if it is of this dtype, else a C-contiguous copy that is."""
    if x.dtype == dtype:
        return x
    return strided.copied(x, dtype) if is_device(x) else x.astype(dtype)


def strided_copy(target: Array, source: Array) -> None:
    """Target = source: equal shapes, on one device."""
    if is_device(target):
        strided.strided_copy(source, target)
    else:
        target[...] = source


def strided_add(target: Array, source: Array) -> None:
    """Target += source: equal shapes, on one device."""
    if is_device(target):
        strided.strided_copy(source, target, add=True)
    else:
        np.add(target, source, out=target)


def fill(x: Array, value: float) -> None:
    """Set all elements of a C-contiguous array."""
    if is_device(x):
        strided.fill(x, value)
    else:
        x.fill(value)
