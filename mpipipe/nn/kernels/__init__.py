"""The arithmetic of layers, losses and optimizers on one device: a module for the host, one for a GPU, same functions.

    host        numpy arrays of every dtype
    full_precision   the same for float32 and float64 alone, without a look at the dtype in each call
    cuda        cupy arrays, CUDA C++ beside it

T is the dtype of activations, A = arrays.accumulator(T) that of statistics, parameters and gradients; every function
computes in A, and rounds once what it returns in T. Matrices are C-contiguous, (rows, width).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.host import any_dtype, full_precision


def of(device: str, dtype: np.dtype | None = None) -> ModuleType:
    """The module for arrays of `dtype`, or of any, on "cpu" or "cuda"."""
    if device == "cpu":
        return any_dtype if dtype is None or arrays.is_half(dtype) else full_precision
    return import_module("mpipipe.nn.kernels.cuda")


def of_array(array) -> ModuleType:
    """The module for the device and dtype of `array`; raises ArgumentError for anything but an array."""
    if isinstance(array, np.ndarray):
        return any_dtype if array.itemsize == 2 else full_precision
    return of(arrays.device_of(array))
