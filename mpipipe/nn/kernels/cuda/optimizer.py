"""Updates of flat buffers on a GPU, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import WORD, DeviceArray, launch, vector_width
from mpipipe.errors import ArgumentError
from mpipipe.nn.kernels.cuda.elementwise import check_alike, check_contiguous
from mpipipe.nn.kernels.interface import AdamWNumbers, Update

HERE = Path(__file__).parent
OPTIMIZER = HERE / "optimizer.cu"
SQUARES = HERE / "squares.cu"
FLOAT64 = np.dtype(np.float64)
CHUNK = 1 << 15  # elements whose squares one block sums


def adamw(
    p: DeviceArray,
    g: DeviceArray,
    m: DeviceArray,
    v: DeviceArray,
    numbers: AdamWNumbers,
    update: Update,
) -> None:
    """Make one step of AdamW, in place."""
    b1, b2, eps, rate, correction1, correction2, shrink = numbers
    step = rate / correction1
    root = 1 / math.sqrt(correction2)
    scalars = (b1, 1 - b1, b2, 1 - b2, eps, step, root, shrink)
    _update("adamw", (p, g, m, v), scalars, update)


def sgd(
    p: DeviceArray,
    g: DeviceArray,
    u: DeviceArray | None,
    momentum: float,
    decay: float,
    rate: float,
    update: Update,
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    if u is None:
        _update("sgd", (p, g), (decay, rate), update, words=2)
    else:
        _update("sgd_momentum", (p, g, u), (momentum, decay, rate), update)


def _update(
    name: str,
    arguments: tuple[DeviceArray, ...],
    scalars: tuple[float, ...],
    update: Update,
    words: int = 1,
) -> None:
    """Launch an update of all elements."""
    p = arguments[0]
    check_alike(name.partition("_")[0], *arguments)
    g_scale, copy = update
    if copy is not None:
        check_contiguous(name, copy)
        if copy.shape != p.shape:
            raise ArgumentError(
                f"the copy of kernels.{name}", found=str(copy.shape), expected=str(p.shape)
            )
    factor = None
    if arrays.is_device(g_scale):
        factor = g_scale
        g_scale = 1.0
    stored = [*arguments]
    absent = [None]
    if copy is not None:
        stored.append(copy)
        absent = []
    dtypes = {"T": p.dtype, "H": stored[-1].dtype}
    width = vector_width(*stored)
    scalars = (*scalars, g_scale)
    numbers = (*stored, *absent, factor, np.int64(p.size), *map(p.dtype.type, scalars))
    launch(OPTIMIZER, name, p.size, numbers, words=words, V=width, **dtypes)


def sums_of_squares(
    flat: DeviceArray, offsets: Sequence[tuple[int, int]], out: DeviceArray | None = None
) -> DeviceArray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64, on the device."""
    check_contiguous("sums_of_squares", flat)
    if out is None:
        out = arrays.empty((len(offsets),), FLOAT64, "cuda")
    if not offsets:
        return out
    chunks, ends = _chunks(tuple(offsets), arrays.cupy().cuda.runtime.getDevice())
    sums = arrays.empty((len(chunks),), FLOAT64, "cuda")
    kernel = partial(arrays.cuda_function, SQUARES, T=flat.dtype, V=WORD // flat.itemsize)
    if len(chunks):
        kernel("square_chunks")((len(chunks),), (256,), (flat, chunks, sums))
    kernel("add_chunks")((len(offsets),), (128,), (sums, ends, out))
    return out


@lru_cache(maxsize=64)
def _chunks(offsets: tuple[tuple[int, int], ...], _device: int) -> tuple[DeviceArray, DeviceArray]:
    """Return (start, stop) of all chunks of all pieces, and where each piece starts among them."""
    chunks = []
    ends = [0]
    for start, stop in offsets:
        chunks += [(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]
        ends.append(len(chunks))
    table = np.array(chunks, np.int64).reshape(-1, 2)
    return arrays.upload(table), arrays.upload(np.array(ends, np.int64))


# -- Clipping by the norm on a GPU, with a factor that the host need not know ----------------------


CLIPPING = HERE / "clipping.cu"


def clip_factor(squares: DeviceArray, max_norm: float, scale: float, divisor: float) -> DeviceArray:
    """Return min(1, max_norm / norm) / divisor, () in float64.

    The norm is sqrt(sum of squares) / scale, of squares (count,) in float64. Where it is not finite
    the result is NaN. The sum is as good as exact: it is rounded once, after more than 100 bits.
    """
    check_contiguous("clip_factor", squares)
    factor = arrays.empty((), FLOAT64, "cuda")
    numbers = map(np.float64, (max_norm, scale, divisor))
    kernel = arrays.cuda_function(CLIPPING, "clip_factor", T=FLOAT64, V=1)
    kernel((1,), (32,), (squares, factor, np.int64(squares.size), *numbers))
    return factor


def rescale(x: DeviceArray, factor: DeviceArray) -> None:
    """X *= factor, of what `clip_factor` returned; nothing where that is NaN.

    x is float32 or float64.
    """
    check_contiguous("rescale", x)
    launch(CLIPPING, "rescale", x.size, (x, factor, np.int64(x.size)), T=x.dtype, V=vector_width(x))
