"""Which arrays are accepted, on which device they lie, and dtypes by name, bfloat16 included."""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ArgumentError

HALVES = ("float16", "bfloat16")


def is_device(array) -> bool:
    """Whether this is an array in the memory of a GPU."""
    return type(array).__module__.split(".")[0] == "cupy" and hasattr(array, "data")


def is_array(array) -> bool:
    """Whether this is an array of either library."""
    return isinstance(array, np.ndarray) or is_device(array)


def device_of(array) -> str:
    """ "cpu" or "cuda"; raises ArgumentError for anything but an array."""
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


def plain(array):
    """A host array of a subclass of numpy.ndarray (memmap, matrix, ...) as an ndarray itself, without a copy.

    Other arrays as they are. Raises ArgumentError for a masked array.
    """
    refuse_mask(array)
    return array.view(np.ndarray) if isinstance(array, np.ndarray) and type(array) is not np.ndarray else array


def refuse_mask(array):
    """Raise ArgumentError for a masked array: nothing here would look at its mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            "a masked array, whose mask would be lost",
            found=f"{array.dtype.name}{list(array.shape)}, masked",
            expected="numpy.ndarray",
            remedy="fill in what is masked with x.filled(value), or take x.data",
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


def is_half(kind: np.dtype) -> bool:
    """Whether this is float16 or bfloat16."""
    return kind.name in HALVES


def accumulator(kind: np.dtype) -> np.dtype:
    """The dtype in which values of dtype `kind` are summed and parameters are kept: float32 for the half types."""
    return np.dtype(np.float32) if is_half(kind) else kind
