"""New arrays on the host or on the current GPU, and copies that stay on one device."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import Array, DeviceArray, Shape, device_of
from mpipipe.arrays.streams import stream
from mpipipe.errors import ArgumentError

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


def aligned_empty(shape: int | Shape, dtype: DTypeLike) -> np.ndarray:
    """Return an uninitialised C-contiguous host array that starts on a 64-byte boundary."""
    dtype = np.dtype(dtype)
    if isinstance(shape, int):
        shape = (shape,)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def empty(shape: int | Shape, dtype: DTypeLike, device: str = "cpu") -> Array:
    """Return an uninitialised C-contiguous array on the host, or the current GPU.

    On the host it starts on a 64-byte boundary. On a GPU the memory is that of CuPy's pool, in the
    order of the current stream.
    """
    if device == "cpu":
        return aligned_empty(shape, dtype)
    return cupy().empty(shape, dtype)


def zeros(shape: int | Shape, dtype: DTypeLike, device: str = "cpu") -> Array:
    """Return a C-contiguous array of zeros, as `empty` does."""
    array = empty(shape, dtype, device)
    set_zero(array)
    return array


def empty_like(array: Array, dtype: DTypeLike | None = None) -> Array:
    """Return an uninitialised C-contiguous array of the same shape and device."""
    if dtype is None:
        dtype = array.dtype
    if isinstance(array, np.ndarray):
        return aligned_empty(array.shape, dtype)
    return cupy().empty(array.shape, dtype)


def zeros_like(array: Array) -> Array:
    """Return a C-contiguous array of zeros of the same shape and dtype on the same device."""
    return zeros(array.shape, array.dtype, device_of(array))


def set_zero(array: Array) -> None:
    """Fill a C-contiguous array with zeros."""
    if isinstance(array, np.ndarray):
        array.fill(0)
    elif array.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memsetAsync(array.data.ptr, 0, array.nbytes, stream().ptr)


def copy_into(target: Array, source: Array) -> None:
    """Copy a C-contiguous array to another on one device; dtypes and sizes must be equal."""
    if target.dtype != source.dtype or target.size != source.size:
        actual, expected = (f"{array.dtype}{list(array.shape)}" for array in (source, target))
        raise ArgumentError("a copy to another kind of array", found=actual, expected=expected)
    if isinstance(target, np.ndarray):
        target[...] = source
    elif source.nbytes:
        runtime = cupy().cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(address(target), address(source), source.nbytes, kind, stream().ptr)


def copy(array: Array) -> Array:
    """Return a copy of an array of any strides on the same device."""
    if isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        return array.copy()
    new = empty_like(array)
    copy_into(new, array)
    return new


def address(array: Array) -> int:
    """Return the address in bytes of the first element, in host or device memory."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.data.ptr)


def shares_memory(first: Array, second: Array) -> bool:
    """Return whether two arrays may overlap; exact for C-contiguous device arrays."""
    if device_of(first) != device_of(second):
        return False
    if isinstance(first, np.ndarray):
        return np.may_share_memory(first, second)
    (low, high), (start, end) = _bounds(first), _bounds(second)
    return low < end and start < high


def shares_any(array: Array, others: Iterable[Array]) -> bool:
    """Return whether an array may overlap one of the others."""
    return any(shares_memory(array, other) for other in others)


def _bounds(array: DeviceArray) -> tuple[int, int]:
    if array.size == 0:
        return 0, 0
    low = array.data.ptr
    high = low + array.itemsize
    for extent, stride in zip(array.shape, array.strides):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high


# -- Device memory that is exhausted: what was asked for, and what there is ------------------------


# where CUDA's libraries ask for memory by themselves; they do not say how much
SAID = ("cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Shortage(NamedTuple):
    """Bytes of the current GPU when a request for more of them had failed."""

    request: int | None  # None if the library that asked does not say
    free: int  # unused ones, in CuPy's pool and beyond it
    total: int  # all of the GPU, or CuPy's limit


def memory_shortage(error: BaseException) -> Shortage | None:
    """Return (bytes an error asked for, bytes free) of a GPU; None for another error."""
    if "cupy" not in sys.modules:
        return None
    library = cupy()
    said = isinstance(error, RuntimeError) and any(name in str(error) for name in SAID)
    if not said and not isinstance(error, library.cuda.memory.OutOfMemoryError):
        return None
    asked = re.search(r"allocating ([\d,]+) bytes", str(error))
    request = None
    if asked:
        request = int(asked[1].replace(",", ""))
    free, total = library.cuda.runtime.memGetInfo()
    pool = library.get_default_memory_pool()
    limit = pool.get_limit()  # CUPY_GPU_MEMORY_LIMIT, or what the program has set; 0 without one
    if limit:
        free = min(free, max(0, limit - pool.total_bytes()))
        total = min(total, limit)
    return Shortage(request, free + pool.free_bytes(), total)
