"""Dropout on a GPU, with the masks of nn/random.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import BLOCK, Call, grid, over, scalar_type, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.nn.kernels.cuda.checks import check_contiguous

DROPOUT = Path(__file__).with_name("dropout.cu")
BYTE = np.dtype(np.uint8)
SEGMENT = 512  # elements that a warp takes at a time


def dropout(
    x: DeviceArray, key: np.ndarray, counter: tuple[int, int, int], threshold: int, factor: float
) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, keep): y = x * factor where `keep`, the random bits of (key, counter) reach `threshold`; else 0."""
    y, keep = arrays.empty_like(x), arrays.empty_like(x, BYTE)
    words = map(np.uint64, (*key, *counter))
    _dropout((x,), (y, keep), (), (*words, np.int32(threshold), scalar_type(x.dtype)(factor)))
    return y, keep


def _pack_dropout(x: DeviceArray, y: DeviceArray, keep: DeviceArray) -> Call | None:
    check_contiguous("dropout", x)
    if not x.size:
        return None
    function = arrays.cuda_function(DROPOUT, "dropout", T=x.dtype, V=vector_width(x, y, keep))
    return Call(function, grid(x.size, SEGMENT * BLOCK // 32), (BLOCK,), (np.int64(x.size),))


def _pack_backward(dy: DeviceArray, keep: DeviceArray, dx: DeviceArray) -> Call | None:
    check_contiguous("dropout_backward", dy, keep)
    width = vector_width(dy, keep, dx)
    return over(DROPOUT, "dropout_backward", dy.size, (np.int64(dy.size),), T=dy.dtype, V=width)


_dropout, _backward = Packed(_pack_dropout), Packed(_pack_backward)


def dropout_backward(dy: DeviceArray, keep: DeviceArray, factor: float) -> DeviceArray:
    """Return dx = dy * factor where `keep`, else 0."""
    dx = arrays.empty_like(dy)
    _backward((dy, keep), (dx,), (), (scalar_type(dy.dtype)(factor),))
    return dx
