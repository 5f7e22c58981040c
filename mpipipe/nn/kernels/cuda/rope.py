"""Rotary positions on a GPU."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.launch import FOLDER, any_bit, over, scalar, word

ROPE = FOLDER / "rope.cu"


def rope_table(positions, head_dim: int, base: float, dtype, device: str = "cuda"):
    """The factors for `apply_rope`: cosine and sine (seq, head_dim / 2, 2) of each position and pair, on the device."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return arrays.upload(table.astype(arrays.accumulator(np.dtype(dtype))))


def apply_rope(x, table, target, inverse: bool = False):
    """target = each pair of neighbours of x turned by its factor, or back by it.

    x and target (batch, seq, heads, head_dim) may have any strides and be the same array.
    """
    size = x.itemsize
    _, seq, heads, dim = x.shape
    here, there = [s // size for s in x.strides], [s // size for s in target.strides]
    width = 1
    if here[3] == there[3] == 1:
        width = word(x, target, divides=any_bit((dim,), here[:3], there[:3]))
    numbers = map(np.int64, (seq, heads, dim, *here, *there))
    args = (x, table, target, np.int64(x.size // max(width, 2)), scalar(x.dtype)(-1 if inverse else 1), *numbers)
    over(ROPE, "apply_rope", x.size, args, words=1, T=x.dtype, V=width)
