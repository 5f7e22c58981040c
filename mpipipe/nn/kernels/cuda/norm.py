"""Normalisation of rows on a GPU; nn/layers/norm.py has the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import grid, scalar_type, vector_width
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
    check_contiguous(name, x, *others)
    rows, width = x.shape
    y, scale = arrays.empty_like(x), arrays.empty((rows,), arrays.accumulator(x.dtype), "cuda")
    if x.size:
        constants = _constants(x, y, *others)
        block = _block(constants["G"])
        arguments = (x, *others, y, scale, np.int64(rows), np.int32(width), scalar_type(x.dtype)(eps))
        arrays.cuda_function(NORM, name, **constants)(grid(rows, block[1]), block, arguments)
    return y, scale


def _backward(
    name: str, dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, count: int
) -> tuple[DeviceArray, ...]:
    """Return dx and `count` gradients of vectors: a row of partial sums for each block, then the sums of those rows."""
    check_alike(name, dy, x)
    check_contiguous(name, gain)
    rows, width = x.shape
    dx = arrays.empty_like(x)
    grads = [arrays.zeros((width,), scale.dtype, "cuda") for _ in range(count)] if not x.size else []
    if x.size:
        constants = _constants(x, dy, dx, gain)
        block = _block(constants["G"])
        blocks = min(-(-rows // block[1]), THREADS // (block[0] * block[1]))
        parts = [arrays.empty((blocks, width), scale.dtype, "cuda") for _ in range(count)]
        arguments = (dy, x, scale, gain, dx, *parts, np.int64(rows), np.int32(width))
        arrays.cuda_function(NORM, name, **constants)((blocks,), block, arguments)
        for part in parts:
            grads.append(arrays.empty((width,), scale.dtype, "cuda"))
            add_columns(part, grads[-1], False)
    return (dx, *grads)


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
