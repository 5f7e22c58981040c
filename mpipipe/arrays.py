"""The one door to array libraries: which namespace an array belongs to, dtypes by name, aligned memory.

Only numpy lives behind it today; code above asks here instead of importing a second array library.
"""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ArgumentError, BackendError

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


def namespace(array):
    """The array library (today always numpy) that made `array`; raises ArgumentError for anything else."""
    if isinstance(array, np.ndarray):
        return np
    raise ArgumentError(
        "not an array",
        found=type(array).__name__,
        expected="numpy.ndarray",
        remedy="convert it with numpy.asarray first; nothing is converted silently",
    )


def dtype(name) -> np.dtype:
    """The numpy dtype called `name`, bfloat16 included."""
    try:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)
    except TypeError:
        raise ArgumentError("unknown dtype", found=repr(name), expected="float32, float64, bfloat16, ...") from None


def is_floating(kind: np.dtype) -> bool:
    """Whether gradients exist for arrays of this dtype (bfloat16 reports kind 'V')."""
    return kind.kind in "fc" or kind.name == "bfloat16"


def check_device(device: str) -> str:
    """Accept the devices that exist; a missing one raises instead of being simulated."""
    if device == "cpu":
        return device
    raise BackendError(
        "this device is not supported", found=repr(device), expected="'cpu'", remedy="use device='cpu'"
    )


def aligned_empty(shape, kind: np.dtype) -> np.ndarray:
    """Uninitialised C-contiguous array that starts on a cache line."""
    kind = np.dtype(kind)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for extent in shape:
        count *= extent
    raw = np.empty(count * kind.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count * kind.itemsize].view(kind).reshape(shape)


def aligned_zeros(shape, kind: np.dtype) -> np.ndarray:
    """As aligned_empty, filled with zeros."""
    array = aligned_empty(shape, kind)
    array.fill(0)
    return array
