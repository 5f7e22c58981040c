"""Functions of single elements, and copies, on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import Call, over, scalar_type, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.arrays.strided import strided_copy
from mpipipe.nn.kernels.cuda.checks import check_alike, check_contiguous

ELEMENTWISE, SWIGLU, CAST = (Path(__file__).with_name(f"{name}.cu") for name in ("elementwise", "swiglu", "cast"))


def _pack_one(x: DeviceArray, y: DeviceArray, name: str) -> Call | None:
    check_alike(name, x, y)
    return over(ELEMENTWISE, name, x.size, (np.int64(x.size),), T=x.dtype, V=vector_width(x, y))


def _pack_two(x: DeviceArray, y: DeviceArray, z: DeviceArray, name: str) -> Call | None:
    check_alike(name, x, y, z)
    return over(ELEMENTWISE, name, x.size, (np.int64(x.size),), T=x.dtype, V=vector_width(x, y, z))


def _pack_swiglu(both: DeviceArray, inner: DeviceArray) -> Call | None:
    check_contiguous("swiglu", both)
    hidden, numbers = inner.shape[1], (np.int64(inner.size), np.int64(inner.shape[1]))
    return over(SWIGLU, "swiglu", inner.size, numbers, T=both.dtype, V=vector_width(both, inner, divides=hidden))


def _pack_swiglu_backward(both: DeviceArray, dinner: DeviceArray, dboth: DeviceArray, _: DeviceArray) -> Call | None:
    check_contiguous("swiglu_backward", both, dinner)
    hidden, numbers = dinner.shape[1], (np.int64(dinner.size), np.int64(dinner.shape[1]))
    width = vector_width(both, dinner, dboth, divides=hidden)
    return over(SWIGLU, "swiglu_backward", dinner.size, numbers, words=1, T=both.dtype, V=width)


def _pack_cast(source: DeviceArray, target: DeviceArray) -> Call | None:
    check_contiguous("cast", source, target)
    numbers, width = (np.int64(source.size),), vector_width(source, target)
    return over(CAST, "cast", source.size, numbers, S=source.dtype, T=target.dtype, V=width)


_of_one, _of_two = Packed(_pack_one), Packed(_pack_two)
_swiglu, _swiglu_backward, _cast = Packed(_pack_swiglu), Packed(_pack_swiglu_backward), Packed(_pack_cast)


def add(x: DeviceArray, y: DeviceArray) -> DeviceArray:
    """Return x + y."""
    z = arrays.empty_like(x)
    _of_two((x, y), (z,), ("add",))
    return z


def accumulate(grad: DeviceArray, part: DeviceArray) -> None:
    """Grad += part."""
    grad, part = arrays.as_reals(grad), arrays.as_reals(part)
    _of_two((grad, part), (grad,), ("add",))


def scale(x: DeviceArray, factor: float, out: DeviceArray | None = None) -> DeviceArray:
    """Return x * factor, in `out` where it is given."""
    y = arrays.empty_like(x) if out is None else out
    own = arrays.as_reals(x)
    _of_one((own, arrays.as_reals(y)), (), ("scale",), (scalar_type(own.dtype)(factor),))
    return y


def gelu(x: DeviceArray) -> DeviceArray:
    """Return y."""
    y = arrays.empty_like(x)
    _of_one((x,), (y,), ("gelu",))
    return y


def gelu_backward(dy: DeviceArray, x: DeviceArray) -> DeviceArray:
    """Return dx."""
    dx = arrays.empty_like(dy)
    _of_two((dy, x), (dx,), ("gelu_backward",))
    return dx


def swiglu(both: DeviceArray) -> DeviceArray:
    """Return silu(gate) * up."""
    rows, twice = both.shape
    inner = arrays.empty((rows, twice // 2), both.dtype, "cuda")
    _swiglu((both,), (inner,))
    return inner


def swiglu_backward(both: DeviceArray, dinner: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """Return (gradient of both, silu(gate) * up); the latter overwrites `dinner`."""
    dboth = arrays.empty_like(both)
    _swiglu_backward((both, dinner), (dboth, dinner))
    return dboth, dinner


def cast(source: DeviceArray, target: DeviceArray) -> None:
    """Target = source, rounded to nearest even."""
    if source.dtype == target.dtype:
        check_contiguous("cast", source, target)
        arrays.copy_into(target, source)
        return
    _cast((source, target))


def copy(source: DeviceArray, target: DeviceArray) -> None:
    """Target = source, with any strides."""
    strided_copy(source, target)
