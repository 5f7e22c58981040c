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
    return _call_of_rows(name, x, (*others, y), eps)


def _forward_of_sum(
    name: str, x: DeviceArray, more: DeviceArray, *others: DeviceArray, eps: float
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    total, y = arrays.empty_like(x), arrays.empty_like(x)
    scale = arrays.empty((len(x),), arrays.accumulator(x.dtype), "cuda")
    _norm_of_sum((x, more, *others), (total, y, scale), (name, eps))
    return total, y, scale


def _pack_norm_of_sum(x: DeviceArray, more: DeviceArray, *rest: Any) -> Call | None:
    *others, total, y, _, name, eps = rest
    check_alike(name, x, more)
    check_contiguous(name, *others)
    return _call_of_rows(name, x, (more, *others, total, y), eps)


def _call_of_rows(name: str, x: DeviceArray, others: tuple[DeviceArray, ...], eps: float) -> Call | None:
    """Return the call of a forward over the rows of x; `others` move in the words of x."""
    if not x.size:
        return None
    constants, (rows, width) = _constants(x, *others), x.shape
    block = _block(constants["G"])
    numbers = np.int64(rows), np.int32(width), scalar_type(x.dtype)(eps)
    return Call(arrays.cuda_function(NORM, name, **constants), grid(rows, block[1]), block, numbers)


def _backward(
    name: str, count: int, given: tuple[DeviceArray, ...], more: DeviceArray | None
) -> tuple[DeviceArray, ...]:
    """Return dx and `count` parts of gradients of vectors, which have a row for each block; add_parts adds them up."""
    _, x, scale, _ = given
    dx, width = arrays.empty_like(x), x.shape[1]
    if more is not None:
        name, given = f"{name}_add", (*given, more)
    call = _norm_backward.call(given, (dx,), (name,))
    if call is None:
        return (dx, *(arrays.zeros((1, width), scale.dtype, "cuda") for _ in range(count)))
    parts = [arrays.empty((call.grid[0], width), scale.dtype, "cuda") for _ in range(count)]
    call.launch((*given, dx, *parts))
    return (dx, *parts)


def _pack_backward(dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, *rest: Any) -> Call | None:
    *more, dx, name = rest
    check_alike(name, dy, x, *more)
    check_contiguous(name, scale, gain)
    if not x.size:
        return None
    constants, (rows, width) = _constants(x, dy, dx, gain, *more), x.shape
    block = _block(constants["G"])
    blocks = min(-(-rows // block[1]), THREADS // (block[0] * block[1]))
    function = arrays.cuda_function(NORM, name, **constants)
    return Call(function, (blocks,), block, (np.int64(rows), np.int32(width)))


_norm, _norm_of_sum, _norm_backward = Packed(_pack_norm), Packed(_pack_norm_of_sum), Packed(_pack_backward)


def rms_norm(x: DeviceArray, gain: DeviceArray, eps: float) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, scale)."""
    return _forward("rms_norm", x, gain, eps=eps)


def add_rms_norm(
    x: DeviceArray, more: DeviceArray, gain: DeviceArray, eps: float
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return (x + more, y, scale)."""
    return _forward_of_sum("add_rms_norm", x, more, gain, eps=eps)


def rms_norm_backward(
    dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, more: DeviceArray | None = None
) -> tuple[DeviceArray, ...]:
    """Return (dx, parts of dgain)."""
    return _backward("rms_norm_backward", 1, (dy, x, scale, gain), more)


def layer_norm(x: DeviceArray, gain: DeviceArray, bias: DeviceArray, eps: float) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, scale)."""
    return _forward("layer_norm", x, gain, bias, eps=eps)


def add_layer_norm(
    x: DeviceArray, more: DeviceArray, gain: DeviceArray, bias: DeviceArray, eps: float
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return (x + more, y, scale)."""
    return _forward_of_sum("add_layer_norm", x, more, gain, bias, eps=eps)


def layer_norm_backward(
    dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, more: DeviceArray | None = None
) -> tuple[DeviceArray, ...]:
    """Return (dx, parts of dgain, parts of dbias)."""
    return _backward("layer_norm_backward", 2, (dy, x, scale, gain), more)
