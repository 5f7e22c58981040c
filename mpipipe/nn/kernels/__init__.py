"""The arithmetic of layers, losses and optimizers: `interface` states the functions, and three modules hold them.

host.any_dtype        numpy arrays of every dtype
host.full_precision   numpy arrays of float32 and float64, without a look at the dtype in each call
cuda                  cupy arrays, by CUDA C++ next to it and cuBLAS
"""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.nn.kernels import cuda
from mpipipe.nn.kernels.host import any_dtype, full_precision
from mpipipe.nn.kernels.interface import AdamWNumbers, Kernels, Update

__all__ = ["AdamWNumbers", "Kernels", "Update", "of", "of_array"]


# mypy compares each module with the interface here
ANY_DTYPE: Kernels = any_dtype
FULL_PRECISION: Kernels = full_precision
CUDA: Kernels = cuda


def of(device: str, dtype: np.dtype | None = None) -> Kernels:
    """Return the kernels for arrays of `dtype`, or of any dtype, on "cpu" or "cuda"."""
    if device == "cuda":
        return CUDA
    return ANY_DTYPE if dtype is None or arrays.is_half(dtype) else FULL_PRECISION


def of_array(array: Array) -> Kernels:
    """Return the kernels for the device and dtype of an array; raise ArgumentError for anything but an array."""
    if isinstance(array, np.ndarray):
        return ANY_DTYPE if array.itemsize == 2 else FULL_PRECISION
    return of(arrays.device_of(array))
