"""Updates of flat buffers on a GPU, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.launch import FOLDER, WORD, check_alike, check_contiguous, over, word

OPTIMIZER, SQUARES = FOLDER / "optimizer.cu", FOLDER / "squares.cu"
CHUNK = 1 << 15  # elements of which one block sums the squares


def adamw(p, g, m, v, *, b1, b2, eps, rate, correction1, correction2, shrink, g_scale):
    """One update of Adam: p = shrink p - rate (m / correction1) / (sqrt(v / correction2) + eps), with

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, correction1 = 1 - b1^t, correction2 = 1 - b2^t. g counts times
    `g_scale`.
    """
    check_alike("adamw", p, g, m, v)
    step, root = rate / correction1, 1 / math.sqrt(correction2)
    numbers = map(p.dtype.type, (b1, 1 - b1, b2, 1 - b2, eps, step, root, shrink, g_scale))
    args = (p, g, m, v, np.int64(p.size), *numbers)
    over(OPTIMIZER, "adamw", p.size, args, words=1, T=p.dtype, V=word(p, g, m, v))


def sgd(p, g, u, *, momentum, decay, rate, g_scale):
    """u = momentum u + g + decay p; p -= rate u. g counts times `g_scale`; u is None without momentum."""
    numbers = map(p.dtype.type, (decay, rate, g_scale))
    if u is None:
        check_alike("sgd", p, g)
        over(OPTIMIZER, "sgd", p.size, (p, g, np.int64(p.size), *numbers), T=p.dtype, V=word(p, g))
        return
    check_alike("sgd", p, g, u)
    args = (p, g, u, np.int64(p.size), p.dtype.type(momentum), *numbers)
    over(OPTIMIZER, "sgd_momentum", p.size, args, words=1, T=p.dtype, V=word(p, g, u))


def sums_of_squares(flat, offsets: Sequence[tuple[int, int]]):
    """For each (start, stop) the sum of flat[start:stop]^2, in float64, on the device."""
    check_contiguous("sums_of_squares", flat)
    out = arrays.empty((len(offsets),), np.dtype(np.float64), "cuda")
    if not offsets:
        return out
    chunks, ends = _chunks(tuple(offsets), arrays.cupy().cuda.runtime.getDevice())
    partial = arrays.empty((len(chunks),), np.dtype(np.float64), "cuda")
    facts = {"T": flat.dtype, "V": WORD // flat.itemsize}
    if len(chunks):
        arrays.cuda_function(SQUARES, "square_chunks", **facts)((len(chunks),), (256,), (flat, chunks, partial))
    arrays.cuda_function(SQUARES, "add_chunks", **facts)((len(offsets),), (128,), (partial, ends, out))
    return out


@lru_cache(maxsize=64)
def _chunks(offsets: tuple[tuple[int, int], ...], _device: int):
    """On the device: (start, stop) of all chunks of all pieces, and the first chunk of each piece with the end."""
    chunks = [[(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)] for start, stop in offsets]
    ends = list(accumulate(map(len, chunks), initial=0))
    table = np.array([chunk for piece in chunks for chunk in piece], np.int64).reshape(-1, 2)
    return arrays.upload(table), arrays.upload(np.array(ends, np.int64))
