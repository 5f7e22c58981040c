"""Which arrays are accepted, on which device they lie, and dtypes by name, bfloat16 included."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from mpipipe.errors import ArgumentError

HALVES = ("float16", "bfloat16")
FLOAT32 = np.dtype(np.float32)

# names of types that stand in annotations
DeviceArray: TypeAlias = Any  # cupy.ndarray: CuPy may be missing, and has no types
Array: TypeAlias = "np.ndarray | DeviceArray"
# What travels between two stages.
Tree: TypeAlias = "Array | tuple[Array, ...] | dict[str, Array]"
Shape: TypeAlias = "tuple[int, ...]"
Stream: TypeAlias = Any  # cupy.cuda.Stream
Event: TypeAlias = Any  # cupy.cuda.Event


def is_device(array: object) -> bool:
    """Return whether this is a cupy.ndarray. CuPy is not imported for this."""
    return _is_of_cupy(cast(Any, type(array))) and hasattr(array, "data")


@cache
def _is_of_cupy(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "cupy"


def is_array(array: object) -> bool:
    """Return whether this is a numpy.ndarray or a cupy.ndarray."""
    return isinstance(array, np.ndarray) or is_device(array)


def device_of(array: object) -> str:
    """Return the kind of device of an array, "cpu" or "cuda"; ArgumentError if it is none."""
    if isinstance(array, np.ndarray):
        return "cpu"
    if is_device(array):
        return "cuda"
    raise ArgumentError(
        "not an array",
        found=type(array).__name__,
        expected="numpy.ndarray or cupy.ndarray",
        remedy="convert it with numpy.asarray or cupy.asarray first; nothing is converted silently",
    )


def strip_subclass(array: Array) -> Array:
    """Return a memmap, matrix or alike as an ndarray itself, without a copy.

    Other arrays are returned as they are; a masked one raises ArgumentError.
    """
    refuse_mask(array)
    if type(array) is np.ndarray or not isinstance(array, np.ndarray):
        return array
    return array.view(np.ndarray)


def refuse_mask(array: object) -> None:
    """Raise ArgumentError for a masked array: nothing here would look at its mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            "a masked array, whose mask would be lost",
            found=f"{array.dtype.name}{list(array.shape)}, masked",
            expected="numpy.ndarray",
            remedy="fill in what is masked with x.filled(value), or take x.data",
        )


def dtype(name: DTypeLike) -> np.dtype:
    """Return the dtype of what `numpy.dtype` takes, or "bfloat16"; else ArgumentError."""
    if name == "bfloat16":
        name = ml_dtypes.bfloat16
    try:
        return np.dtype(name)
    except TypeError:
        raise ArgumentError(
            "unknown dtype", found=repr(name), expected="float32, float64, bfloat16, ..."
        ) from None


# Layers and attention compute in these.
COMPUTE_DTYPES = tuple(map(dtype, ("float32", "float64", *HALVES)))


def is_floating(kind: np.dtype) -> bool:
    """Return whether gradients exist for arrays of this dtype; the kind of bfloat16 is "V"."""
    return kind.kind in "fc" or kind.name == "bfloat16"


def as_reals(array: Array) -> Array:
    """Return a C-contiguous complex array (...) as reals (..., 2) on the same memory.

    Any other array comes back as it is.
    """
    if array.dtype.kind != "c":
        return array
    return array.reshape(-1).view(array.dtype.char.lower()).reshape(*array.shape, 2)


@cache  # numpy makes the name of a dtype anew each time, in 3 us
def is_half(kind: np.dtype) -> bool:
    """Return whether this dtype is float16 or bfloat16."""
    return kind.name in HALVES


@cache
def accumulator(kind: np.dtype) -> np.dtype:
    """Return the dtype of sums and parameters: float32 for halves, else itself."""
    if is_half(kind):
        return FLOAT32
    return kind
