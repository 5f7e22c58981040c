"""Dropout on a GPU, with the masks of nn/random.py."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.launch import BLOCK, FOLDER, check_contiguous, grid, over, scalar, word

DROPOUT = FOLDER / "dropout.cu"
SEGMENT = 512  # elements that a warp takes at a time


def dropout(x, key, counter: tuple[int, int, int], threshold: int, factor: float):
    """(y, keep): y = x * factor where the random bits of (key, counter) reach `threshold`, as `keep` says; else 0."""
    check_contiguous("dropout", x)
    y, keep = arrays.empty_like(x), arrays.empty_like(x, np.dtype(np.uint8))
    if x.size:
        words = map(np.uint64, (*key, *counter))
        args = (x, y, keep, np.int64(x.size), *words, np.int32(threshold), scalar(x.dtype)(factor))
        shape = grid(x.size, SEGMENT * BLOCK // 32), (BLOCK,)
        arrays.cuda_function(DROPOUT, "dropout", T=x.dtype, V=word(x, y, keep))(*shape, args)
    return y, keep


def dropout_backward(dy, keep, factor: float):
    """dx = dy * factor where `keep`, else 0."""
    check_contiguous("dropout_backward", dy, keep)
    dx = arrays.empty_like(dy)
    args = (dy, keep, dx, np.int64(dy.size), scalar(dy.dtype)(factor))
    over(DROPOUT, "dropout_backward", dy.size, args, T=dy.dtype, V=word(dy, keep, dx))
    return dx
