"""Normalisation of rows on a GPU; nn/layers/norm.py has the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import Call, grid, scalar_type, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.nn.kernels.cuda.checks import check_alike, check_contiguous
from mpipipe.nn.kernels.cuda.linear import add_columns

NORM = Path(__file__).with_name("norm.cu")
KEPT = 4  # words of a row that one thread keeps in registers
SHARED = (32, 64, 128, 256)  # threads that may share a row so
LONG = 512  # threads that share a row too long for that
PER_BLOCK = 128  # threads of a block of several rows
THREADS = 132 * 512  # for one pass of a backward: fixed, so that sums do not depend on the GPU


def _constants(x: DeviceArray, *others: DeviceArray) -> dict[str, Any]:
    """Return the constants that norm.cu is compiled for."""
    width = vector_width(x, *others, divides=x.shape[1])
    words = x.shape[1] // width
    threads = next((n for n in SHARED if words <= n * KEPT), 0)
    if not threads:
        return {"T": x.dtype, "V": width, "G": LONG, "K": 0}
    return {"T": x.dtype, "V": width, "G": threads, "K": -(-words // threads)}


def _block(threads: int) -> tuple[int, int]:
    """Return the block in which `threads` threads share a row."""
    return (threads, PER_BLOCK // threads if threads == 32 else 1)


def _forward(name: str, x: DeviceArray, *others: DeviceArray, eps: float) -> tuple[DeviceArray, DeviceArray]:
    y, scale = arrays.empty_like(x), arrays.empty((len(x),), arrays.accumulator(x.dtype), "cuda")
    _norm((x, *others), (y, scale), (name, eps))
    return y, scale


def _pack_norm(x: DeviceArray, *rest: Any) -> Call | None:
    *others, y, _, name, eps = rest
    check_contiguous(name, x, *others)
    if not x.size:
        return None
    constants, (rows, width) = _constants(x, y, *others), x.shape
    block = _block(constants["G"])
    numbers = np.int64(rows), np.int32(width), scalar_type(x.dtype)(eps)
    return Call(arrays.cuda_function(NORM, name, **constants), grid(rows, block[1]), block, numbers)


def _backward(
    name: str, dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, count: int
) -> tuple[DeviceArray, ...]:
    """Return dx and `count` gradients of vectors: a row of partial sums for each block, then the sums of those rows."""
    dx, width = arrays.empty_like(x), x.shape[1]
    call = _norm_backward.call((dy, x, scale, gain), (dx,), (name,))
    if call is None:
        return (dx, *(arrays.zeros((width,), scale.dtype, "cuda") for _ in range(count)))
    parts = [arrays.empty((call.grid[0], width), scale.dtype, "cuda") for _ in range(count)]
    call.launch((dy, x, scale, gain, dx, *parts))
    grads = [arrays.empty((width,), scale.dtype, "cuda") for _ in range(count)]
    for part, grad in zip(parts, grads):
        add_columns(part, grad, False)
    return (dx, *grads)


def _pack_backward(
    dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, dx: DeviceArray, name: str
) -> Call | None:
    check_alike(name, dy, x)
    check_contiguous(name, scale, gain)
    if not x.size:
        return None
    constants, (rows, width) = _constants(x, dy, dx, gain), x.shape
    block = _block(constants["G"])
    blocks = min(-(-rows // block[1]), THREADS // (block[0] * block[1]))
    function = arrays.cuda_function(NORM, name, **constants)
    return Call(function, (blocks,), block, (np.int64(rows), np.int32(width)))


_norm, _norm_backward = Packed(_pack_norm), Packed(_pack_backward)


def rms_norm(x: DeviceArray, gain: DeviceArray, eps: float) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, scale)."""
    return _forward("rms_norm", x, gain, eps=eps)


def rms_norm_backward(
    dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray
) -> tuple[DeviceArray, ...]:
    """Return (dx, dgain)."""
    return _backward("rms_norm_backward", dy, x, scale, gain, 1)


def layer_norm(x: DeviceArray, gain: DeviceArray, bias: DeviceArray, eps: float) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, scale)."""
    return _forward("layer_norm", x, gain, bias, eps=eps)


def layer_norm_backward(
    dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray
) -> tuple[DeviceArray, ...]:
    """Return (dx, dgain, dbias)."""
    return _backward("layer_norm_backward", dy, x, scale, gain, 2)
