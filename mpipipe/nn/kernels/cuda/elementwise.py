"""Functions of single elements, and copies, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import launch, scalar_type, vector_width
from mpipipe.arrays.strided import strided_copy
from mpipipe.nn.kernels.cuda.checks import check_alike, check_contiguous

ELEMENTWISE, SWIGLU, CAST = (Path(__file__).with_name(f"{name}.cu") for name in ("elementwise", "swiglu", "cast"))


def _of_one(name: str, x: DeviceArray, y: DeviceArray, *numbers: Any) -> DeviceArray:
    check_alike(name, x, y)
    launch(ELEMENTWISE, name, x.size, (x, *numbers, y, np.int64(x.size)), T=x.dtype, V=vector_width(x, y))
    return y


def _of_two(name: str, x: DeviceArray, y: DeviceArray, z: DeviceArray) -> DeviceArray:
    check_alike(name, x, y, z)
    launch(ELEMENTWISE, name, x.size, (x, y, z, np.int64(x.size)), T=x.dtype, V=vector_width(x, y, z))
    return z


def add(x: DeviceArray, y: DeviceArray) -> DeviceArray:
    """Return x + y."""
    return _of_two("add", x, y, arrays.empty_like(x))


def accumulate(grad: DeviceArray, part: DeviceArray) -> None:
    """Grad += part."""
    _of_two("add", grad, part, grad)


def scale(x: DeviceArray, factor: float, out: DeviceArray | None = None) -> DeviceArray:
    """Return x * factor, in `out` where it is given."""
    return _of_one("scale", x, arrays.empty_like(x) if out is None else out, scalar_type(x.dtype)(factor))


def gelu(x: DeviceArray) -> DeviceArray:
    """Return y."""
    return _of_one("gelu", x, arrays.empty_like(x))


def gelu_backward(dy: DeviceArray, x: DeviceArray) -> DeviceArray:
    """Return dx."""
    return _of_two("gelu_backward", dy, x, arrays.empty_like(dy))


def swiglu(both: DeviceArray) -> DeviceArray:
    """Return silu(gate) * up."""
    check_contiguous("swiglu", both)
    rows, hidden = both.shape[0], both.shape[1] // 2
    inner = arrays.empty((rows, hidden), both.dtype, "cuda")
    width = vector_width(both, inner, divides=hidden)
    arguments = (both, inner, np.int64(inner.size), np.int64(hidden))
    launch(SWIGLU, "swiglu", inner.size, arguments, T=both.dtype, V=width)
    return inner


def swiglu_backward(both: DeviceArray, dinner: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """Return (gradient of both, silu(gate) * up); the latter overwrites `dinner`."""
    check_contiguous("swiglu_backward", both, dinner)
    hidden, dboth = dinner.shape[1], arrays.empty_like(both)
    width = vector_width(both, dinner, dboth, divides=hidden)
    arguments = (both, dinner, dboth, dinner, np.int64(dinner.size), np.int64(hidden))
    launch(SWIGLU, "swiglu_backward", dinner.size, arguments, words=1, T=both.dtype, V=width)
    return dboth, dinner


def cast(source: DeviceArray, target: DeviceArray) -> None:
    """Target = source, rounded to nearest even."""
    check_contiguous("cast", source, target)
    if source.dtype == target.dtype:
        arrays.copy_into(target, source)
        return
    arguments, width = (source, target, np.int64(source.size)), vector_width(source, target)
    launch(CAST, "cast", source.size, arguments, S=source.dtype, T=target.dtype, V=width)


def copy(source: DeviceArray, target: DeviceArray) -> None:
    """Target = source, with any strides."""
    strided_copy(source, target)
