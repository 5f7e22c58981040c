"""Updates of flat buffers on a GPU, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import WORD, launch, vector_width
from mpipipe.nn.kernels.cuda.checks import check_alike, check_contiguous

OPTIMIZER, SQUARES = (Path(__file__).with_name(f"{name}.cu") for name in ("optimizer", "squares"))
CHUNK = 1 << 15  # elements of which one block sums the squares


def adamw(
    p: DeviceArray,
    g: DeviceArray,
    m: DeviceArray,
    v: DeviceArray,
    *,
    b1: float,
    b2: float,
    eps: float,
    rate: float,
    correction1: float,
    correction2: float,
    shrink: float,
    g_scale: float,
) -> None:
    """Make one step of AdamW, in place."""
    check_alike("adamw", p, g, m, v)
    step, root = rate / correction1, 1 / math.sqrt(correction2)
    numbers = map(p.dtype.type, (b1, 1 - b1, b2, 1 - b2, eps, step, root, shrink, g_scale))
    arguments = (p, g, m, v, np.int64(p.size), *numbers)
    launch(OPTIMIZER, "adamw", p.size, arguments, words=1, T=p.dtype, V=vector_width(p, g, m, v))


def sgd(
    p: DeviceArray, g: DeviceArray, u: DeviceArray | None, *, momentum: float, decay: float, rate: float, g_scale: float
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    numbers = map(p.dtype.type, (decay, rate, g_scale))
    if u is None:
        check_alike("sgd", p, g)
        launch(OPTIMIZER, "sgd", p.size, (p, g, np.int64(p.size), *numbers), T=p.dtype, V=vector_width(p, g))
        return
    check_alike("sgd", p, g, u)
    arguments = (p, g, u, np.int64(p.size), p.dtype.type(momentum), *numbers)
    launch(OPTIMIZER, "sgd_momentum", p.size, arguments, words=1, T=p.dtype, V=vector_width(p, g, u))


def sums_of_squares(flat: DeviceArray, offsets: Sequence[tuple[int, int]]) -> DeviceArray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64, on the device."""
    check_contiguous("sums_of_squares", flat)
    out = arrays.empty((len(offsets),), np.dtype(np.float64), "cuda")
    if not offsets:
        return out
    chunks, ends = _chunks(tuple(offsets), arrays.cupy().cuda.runtime.getDevice())
    partial = arrays.empty((len(chunks),), np.dtype(np.float64), "cuda")
    constants: dict[str, Any] = {"T": flat.dtype, "V": WORD // flat.itemsize}
    if len(chunks):
        arrays.cuda_function(SQUARES, "square_chunks", **constants)((len(chunks),), (256,), (flat, chunks, partial))
    arrays.cuda_function(SQUARES, "add_chunks", **constants)((len(offsets),), (128,), (partial, ends, out))
    return out


@lru_cache(maxsize=64)
def _chunks(offsets: tuple[tuple[int, int], ...], _device: int) -> tuple[DeviceArray, DeviceArray]:
    """Return (start, stop) of all chunks of all pieces, and where each piece starts and the last ends among them."""
    chunks = [[(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)] for start, stop in offsets]
    ends = list(accumulate(map(len, chunks), initial=0))
    table = np.array([chunk for piece in chunks for chunk in piece], np.int64).reshape(-1, 2)
    return arrays.upload(table), arrays.upload(np.array(ends, np.int64))
