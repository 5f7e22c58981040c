"""Functions of single elements, and copies, on a GPU."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.launch import FOLDER, any_bit, check_alike, check_contiguous, over, scalar, word

ELEMENTWISE, SWIGLU, CAST, COPY = (FOLDER / f"{name}.cu" for name in ("elementwise", "swiglu", "cast", "copy"))


def _of_one(name, x, y, *numbers):
    check_alike(name, x, y)
    over(ELEMENTWISE, name, x.size, (x, *numbers, y, np.int64(x.size)), T=x.dtype, V=word(x, y))
    return y


def _of_two(name, x, y, z):
    check_alike(name, x, y, z)
    over(ELEMENTWISE, name, x.size, (x, y, z, np.int64(x.size)), T=x.dtype, V=word(x, y, z))
    return z


def add(x, y):
    """x + y, of equal shapes."""
    return _of_two("add", x, y, arrays.empty_like(x))


def accumulate(grad, part):
    """grad += part."""
    _of_two("add", grad, part, grad)


def scale(x, factor: float, out=None):
    """x * factor, into `out` where it is given, which may be x."""
    return _of_one("scale", x, arrays.empty_like(x) if out is None else out, scalar(x.dtype)(factor))


def gelu(x):
    """y, for x of any shape."""
    return _of_one("gelu", x, arrays.empty_like(x))


def gelu_backward(dy, x):
    """dx."""
    return _of_two("gelu_backward", dy, x, arrays.empty_like(dy))


def swiglu(both):
    """silu(gate) * up (rows, hidden), of both = gate | up (rows, 2 hidden)."""
    check_contiguous("swiglu", both)
    rows, hidden = both.shape[0], both.shape[1] // 2
    inner = arrays.empty((rows, hidden), both.dtype, "cuda")
    width = word(both, inner, divides=hidden)
    args = (both, inner, np.int64(inner.size), np.int64(hidden))
    over(SWIGLU, "swiglu", inner.size, args, T=both.dtype, V=width)
    return inner


def swiglu_backward(both, dinner):
    """(gradient of both, silu(gate) * up); the latter overwrites `dinner`, its gradient."""
    check_contiguous("swiglu_backward", both, dinner)
    hidden, dboth = dinner.shape[1], arrays.empty_like(both)
    width = word(both, dinner, dboth, divides=hidden)
    args = (both, dinner, dboth, dinner, np.int64(dinner.size), np.int64(hidden))
    over(SWIGLU, "swiglu_backward", dinner.size, args, words=1, T=both.dtype, V=width)
    return dboth, dinner


def cast(source, target):
    """target = source, rounded to nearest even."""
    check_contiguous("cast", source, target)
    if source.dtype == target.dtype:
        arrays.copy_into(target, source)
        return
    args = (source, target, np.int64(source.size))
    over(CAST, "cast", source.size, args, S=source.dtype, T=target.dtype, V=word(source, target))


def copy(source, target):
    """target = source, of one dtype and shape (four axes at most), with any strides."""
    if source.flags.c_contiguous and target.flags.c_contiguous:
        arrays.copy_into(target, source)
        return
    if not source.size:
        return
    shape, from_strides, to_strides = _walk(source, target)
    width = 1
    if from_strides[3] == to_strides[3] == 1:
        width = word(source, target, divides=any_bit(shape[3:], from_strides[:3], to_strides[:3]))
    numbers = map(np.int64, (source.size // width, *shape[1:], *from_strides, *to_strides))
    over(COPY, "copy", source.size, (source, target, *numbers), T=source.dtype, V=width)


def _walk(source, target):
    """Shape and strides in elements with four axes: the fastest of target last, neighbours joined where both can be."""
    size = source.itemsize
    axes = [(e, s // size, t // size) for e, s, t in zip(source.shape, source.strides, target.strides) if e > 1]
    axes.sort(key=lambda axis: -abs(axis[2]))
    joined: list[tuple[int, int, int]] = []
    for extent, here, there in axes:
        if joined and joined[-1][1:] == (extent * here, extent * there):
            joined[-1] = (joined[-1][0] * extent, here, there)
        else:
            joined.append((extent, here, there))
    joined = [(1, 0, 0)] * (4 - len(joined)) + joined
    return tuple(zip(*joined))
