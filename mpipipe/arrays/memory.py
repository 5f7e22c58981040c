"""New arrays on the host or on the current GPU, and copies that stay on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import device_of
from mpipipe.arrays.streams import stream
from mpipipe.errors import ArgumentError

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


def aligned_empty(shape, kind: np.dtype) -> np.ndarray:
    """Uninitialised C-contiguous host array that starts on a cache line."""
    kind = np.dtype(kind)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for extent in shape:
        count *= extent
    raw = np.empty(count * kind.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count * kind.itemsize].view(kind).reshape(shape)


def empty(shape, kind: np.dtype, device: str = "cpu"):
    """Uninitialised C-contiguous array on `device`; on a GPU from CuPy's pool, in the order of the current stream."""
    if device == "cpu":
        return aligned_empty(shape, kind)
    return cupy().empty(shape, kind)


def zeros(shape, kind: np.dtype, device: str = "cpu"):
    """As `empty`, filled with zeros."""
    array = empty(shape, kind, device)
    set_zero(array)
    return array


def empty_like(array, kind: np.dtype | None = None):
    """Uninitialised C-contiguous array of the same shape on the same device."""
    return empty(array.shape, array.dtype if kind is None else kind, device_of(array))


def set_zero(array):
    """Fill a C-contiguous array with zeros."""
    if isinstance(array, np.ndarray):
        array.fill(0)
    elif array.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memsetAsync(array.data.ptr, 0, array.nbytes, stream().ptr)


def copy_into(target, source):
    """Copy `source` to `target`, both C-contiguous, of one dtype and size, on one device."""
    if target.dtype != source.dtype or target.size != source.size:
        found, expected = (f"{array.dtype}{list(array.shape)}" for array in (source, target))
        raise ArgumentError("a copy to another kind of array", found=found, expected=expected)
    if isinstance(target, np.ndarray):
        target[...] = source
    elif source.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, stream().ptr)


def copy(array):
    """A copy of an array on the same device."""
    if isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        return array.copy()
    new = empty_like(array)
    copy_into(new, array)
    return new


def concatenate(parts: Sequence):
    """C-contiguous arrays of one dtype and device, put together along axis 0."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    whole = empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype, "cuda")
    start = 0
    for part in parts:
        copy_into(whole[start : start + part.shape[0]], part)
        start += part.shape[0]
    return whole


def address(array) -> int:
    """Where the first element lies, in host or device memory."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def shares_memory(first, second) -> bool:
    """Whether two arrays may overlap; exact for C-contiguous device arrays."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and np.may_share_memory(first, second)
    (low, high), (start, end) = _bounds(first), _bounds(second)
    return low < end and start < high


def _bounds(array) -> tuple[int, int]:
    if array.size == 0:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides)]
    low = array.data.ptr + sum(step for step in reach if step < 0)
    return low, array.data.ptr + sum(step for step in reach if step > 0) + array.itemsize
