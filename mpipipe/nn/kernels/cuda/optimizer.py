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
from mpipipe.arrays import WORD, DeviceArray, bitwise_or, launch, vector_width
from mpipipe.errors import ArgumentError
from mpipipe.nn.kernels.cuda.elementwise import check_alike, check_contiguous
from mpipipe.nn.kernels.interface import AdamWNumbers, Range, Update

OPTIMIZER, SQUARES = (Path(__file__).with_name(f"{name}.cu") for name in ("optimizer", "squares"))
# Between ranges of one launch; a stage has six ranges at most, by the order of its parameters in
# memory.
BOUNDS = 5
CHUNK = 1 << 15  # elements whose squares one block sums
WHOLE = Update()


def adamw(
    p: DeviceArray,
    g: DeviceArray,
    m: DeviceArray,
    v: DeviceArray,
    numbers: AdamWNumbers,
    update: Update = WHOLE,
) -> None:
    """Make one step of AdamW, in place."""
    b1, b2, eps, rate, correction1, correction2, shrink = numbers
    scalars = b1, 1 - b1, b2, 1 - b2, eps, rate / correction1, 1 / math.sqrt(correction2), shrink
    _update("adamw", (p, g, m, v), scalars, update)


def sgd(
    p: DeviceArray,
    g: DeviceArray,
    u: DeviceArray | None,
    momentum: float,
    decay: float,
    rate: float,
    update: Update = WHOLE,
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    if u is None:
        _update("sgd", (p, g), (decay, rate), update, words=2)
    else:
        _update("sgd_momentum", (p, g, u), (momentum, decay, rate), update)


def _update(
    name: str,
    given: tuple[DeviceArray, ...],
    numbers: tuple[float, ...],
    update: Update,
    words: int = 1,
) -> None:
    """Launch an update: once, unless there are more ranges than kernels take."""
    p, (g_scale, ranges, copy) = given[0], update
    check_alike(name.partition("_")[0], *given)
    if copy is not None:
        check_contiguous(name, copy)
        if copy.shape != p.shape:
            raise ArgumentError(
                f"the copy of kernels.{name}", found=str(copy.shape), expected=str(p.shape)
            )
    on_device = arrays.is_device(g_scale)
    factor, g_scale = (g_scale, 1.0) if on_device else (None, g_scale)
    scalars = tuple(map(p.dtype.type, (*numbers, g_scale)))
    for start, stop, first, bounds in _launches(p.size, None if ranges is None else tuple(ranges)):
        parts = [x[start:stop] for x in given]
        kept = None if copy is None else copy[start:stop]
        arguments = (
            *parts,
            kept,
            factor,
            np.int64(stop - start),
            *map(np.int64, bounds),
            np.int32(first),
            *scalars,
        )
        moved = parts if kept is None else [*parts, kept]
        width = vector_width(
            *moved, divides=bitwise_or([bound for bound in bounds if bound < stop - start])
        )
        dtypes = {"T": p.dtype, "H": p.dtype if copy is None else copy.dtype}
        launch(OPTIMIZER, name, stop - start, arguments, words=words, V=width, **dtypes)


@lru_cache(maxsize=64)
def _launches(
    size: int, ranges: tuple[Range, ...] | None
) -> list[tuple[int, int, bool, tuple[int, ...]]]:
    """Return (start, stop, whether the first elements decay, where that changes after start) for
    each launch.
    """
    joined: list[Range] = []
    for start, stop, decays in [(0, size, True)] if ranges is None else ranges:
        if start != (joined[-1][1] if joined else 0):
            raise ArgumentError(
                "ranges of weight decay",
                found=str(ranges),
                expected="each begins where one has ended",
            )
        if joined and joined[-1][2] == decays:
            joined[-1] = (joined[-1][0], stop, decays)
        elif stop > start:
            joined.append((start, stop, decays))
    if (joined[-1][1] if joined else 0) != size:
        raise ArgumentError(
            "ranges of weight decay", found=str(ranges), expected=f"the last ends at {size}"
        )
    launches = []
    for at in range(0, len(joined), BOUNDS + 1):
        (first, _, decays), *rest = piece = joined[at : at + BOUNDS + 1]
        stop = piece[-1][1]
        bounds = [start - first for start, _, _ in rest] + [stop - first] * (BOUNDS - len(rest))
        launches.append((first, stop, decays, tuple(bounds)))
    return launches


def sums_of_squares(
    flat: DeviceArray, offsets: Sequence[tuple[int, int]], out: DeviceArray | None = None
) -> DeviceArray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64, on the device; in
    `out` where given.
    """
    check_contiguous("sums_of_squares", flat)
    out = arrays.empty((len(offsets),), np.dtype(np.float64), "cuda") if out is None else out
    if not offsets:
        return out
    chunks, ends = _chunks(tuple(offsets), arrays.cupy().cuda.runtime.getDevice())
    partial = arrays.empty((len(chunks),), np.dtype(np.float64), "cuda")
    constants: dict[str, Any] = {"T": flat.dtype, "V": WORD // flat.itemsize}
    if len(chunks):
        arrays.cuda_function(SQUARES, "square_chunks", **constants)(
            (len(chunks),), (256,), (flat, chunks, partial)
        )
    arrays.cuda_function(SQUARES, "add_chunks", **constants)(
        (len(offsets),), (128,), (partial, ends, out)
    )
    return out


@lru_cache(maxsize=64)
def _chunks(offsets: tuple[tuple[int, int], ...], _device: int) -> tuple[DeviceArray, DeviceArray]:
    """Return (start, stop) of all chunks of all pieces, and where each piece starts and the last
    ends among them.
    """
    chunks = [
        [(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)] for start, stop in offsets
    ]
    ends = list(accumulate(map(len, chunks), initial=0))
    table = np.array([chunk for piece in chunks for chunk in piece], np.int64).reshape(-1, 2)
    return arrays.upload(table), arrays.upload(np.array(ends, np.int64))


# -- Clipping by the norm on a GPU, with a factor that the host need not know ----------------------


CLIPPING = Path(__file__).with_name("clipping.cu")
FLOAT64 = np.dtype(np.float64)


def clip_factor(squares: DeviceArray, max_norm: float, scale: float, divisor: float) -> DeviceArray:
    """Return c / divisor () in float64, where c = max_norm / norm if norm is above max_norm, else
    1.

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
    """X *= factor, of what `clip_factor` returned; x is float32 or float64, and stays as it is
    where that is NaN.
    """
    check_contiguous("rescale", x)
    launch(CLIPPING, "rescale", x.size, (x, factor, np.int64(x.size)), T=x.dtype, V=vector_width(x))
