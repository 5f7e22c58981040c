"""Dropout on a GPU, with the masks of nn/random.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import BLOCK, grid, launch, scalar_type, vector_width
from mpipipe.nn.kernels.cuda.checks import check_contiguous

DROPOUT = Path(__file__).with_name("dropout.cu")
SEGMENT = 512  # elements that a warp takes at a time


def dropout(
    x: DeviceArray, key: np.ndarray, counter: tuple[int, int, int], threshold: int, factor: float
) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, keep): y = x * factor where `keep`, the random bits of (key, counter) reach `threshold`; else 0."""
    check_contiguous("dropout", x)
    y, keep = arrays.empty_like(x), arrays.empty_like(x, np.dtype(np.uint8))
    if x.size:
        words = map(np.uint64, (*key, *counter))
        arguments = (x, y, keep, np.int64(x.size), *words, np.int32(threshold), scalar_type(x.dtype)(factor))
        function = arrays.cuda_function(DROPOUT, "dropout", T=x.dtype, V=vector_width(x, y, keep))
        function(grid(x.size, SEGMENT * BLOCK // 32), (BLOCK,), arguments)
    return y, keep


def dropout_backward(dy: DeviceArray, keep: DeviceArray, factor: float) -> DeviceArray:
    """Return dx = dy * factor where `keep`, else 0."""
    check_contiguous("dropout_backward", dy, keep)
    dx = arrays.empty_like(dy)
    arguments = (dy, keep, dx, np.int64(dy.size), scalar_type(dy.dtype)(factor))
    launch(DROPOUT, "dropout_backward", dy.size, arguments, T=dy.dtype, V=vector_width(dy, keep, dx))
    return dx
