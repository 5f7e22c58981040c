"""Functions of single elements, and copies, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import BLOCK, DeviceArray, Launch, Packed, grid, over, scalar_type, vector_width
from mpipipe.errors import ArgumentError

HERE = Path(__file__).parent
ELEMENTWISE = HERE / "elementwise.cu"
SWIGLU = HERE / "swiglu.cu"


def int64s(*numbers: int) -> tuple[np.int64, ...]:
    """Return sizes as kernels take them."""
    return tuple(map(np.int64, numbers))


@Packed
def _elements(x: DeviceArray, *rest: Any) -> Launch | None:
    *others, name = rest
    check_alike(name, x, *others)
    return over(ELEMENTWISE, name, x.size, int64s(x.size), T=x.dtype, V=vector_width(x, *others))


@Packed
def _swiglu(both: DeviceArray, inner: DeviceArray, *fresh: DeviceArray) -> Launch | None:
    name, words = ("swiglu_backward", 1) if fresh else ("swiglu", 2)
    check_contiguous(name, both, inner)
    numbers = int64s(inner.size, inner.shape[1])
    width = vector_width(both, inner, *fresh, divides=inner.shape[1])
    return over(SWIGLU, name, inner.size, numbers, words=words, T=both.dtype, V=width)


def add(x: DeviceArray, y: DeviceArray) -> DeviceArray:
    """Return x + y."""
    z = arrays.empty_like(x)
    _elements((x, y), (z,), ("add",))
    return z


def accumulate(grad: DeviceArray, part: DeviceArray) -> None:
    """Grad += part."""
    grad = arrays.as_reals(grad)
    part = arrays.as_reals(part)
    _elements((grad, part), (grad,), ("add",))


def scale(x: DeviceArray, factor: float, out: DeviceArray | None = None) -> DeviceArray:
    """Return x * factor, in `out` where it is given."""
    if out is None:
        out = arrays.empty_like(x)
    reals = arrays.as_reals(x)
    _elements((reals, arrays.as_reals(out)), (), ("scale",), (scalar_type(reals.dtype)(factor),))
    return out


def gelu(x: DeviceArray) -> DeviceArray:
    """Return y."""
    y = arrays.empty_like(x)
    _elements((x,), (y,), ("gelu",))
    return y


def gelu_backward(dy: DeviceArray, x: DeviceArray) -> DeviceArray:
    """Return dx."""
    dx = arrays.empty_like(dy)
    _elements((dy, x), (dx,), ("gelu_backward",))
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
    _swiglu((both, dinner), (dboth, dinner))
    return dboth, dinner


# -- Dropout on a GPU, with the masks of nn/random.py ----------------------------------------------


DROPOUT = HERE / "dropout.cu"
BYTE = np.dtype(np.uint8)
SEGMENT = 512  # elements that a warp takes at a time


def dropout(
    x: DeviceArray, key: np.ndarray, counter: tuple[int, int, int], threshold: int, factor: float
) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, keep): y = x * factor where the random bits reach `threshold`, else 0."""
    y = arrays.empty_like(x)
    keep = arrays.empty_like(x, BYTE)
    words = map(np.uint64, (*key, *counter))
    _dropout((x,), (y, keep), (), (*words, np.int32(threshold), scalar_type(x.dtype)(factor)))
    return y, keep


@Packed
def _dropout(x: DeviceArray, y: DeviceArray, keep: DeviceArray) -> Launch | None:
    check_contiguous("dropout", x)
    if not x.size:
        return None
    function = arrays.cuda_function(DROPOUT, "dropout", T=x.dtype, V=vector_width(x, y, keep))
    return Launch(function, grid(x.size, SEGMENT * BLOCK // 32), (BLOCK,), int64s(x.size))


@Packed
def _dropout_backward(dy: DeviceArray, keep: DeviceArray, dx: DeviceArray) -> Launch | None:
    check_contiguous("dropout_backward", dy, keep)
    width = vector_width(dy, keep, dx)
    return over(DROPOUT, "dropout_backward", dy.size, int64s(dy.size), T=dy.dtype, V=width)


def dropout_backward(dy: DeviceArray, keep: DeviceArray, factor: float) -> DeviceArray:
    """Return dx = dy * factor where `keep`, else 0."""
    dx = arrays.empty_like(dy)
    _dropout_backward((dy, keep), (dx,), (), (scalar_type(dy.dtype)(factor),))
    return dx


# -- What the functions on a GPU ask of their arrays -----------------------------------------------


def check_contiguous(name: str, *several: DeviceArray) -> None:
    """Raise ArgumentError unless all arrays are C-contiguous."""
    for array in several:
        if not array.flags.c_contiguous:
            raise ArgumentError(
                f"kernels.{name} takes C-contiguous arrays on a GPU",
                found=f"shape {array.shape}, strides {array.strides}",
                remedy="copy it first, with kernels.copy",
            )


def check_alike(name: str, first: DeviceArray, *others: DeviceArray) -> None:
    """Raise ArgumentError unless all arrays are C-contiguous, of one shape and dtype."""
    check_contiguous(name, first, *others)
    for array in others:
        if array.shape != first.shape or array.dtype != first.dtype:
            raise _unequal(name, first, array, "one shape and one dtype")


def check_matrices(
    name: str, first: DeviceArray, axis: int, other: DeviceArray, axis_of_other: int
) -> None:
    """Raise ArgumentError unless these are C-contiguous matrices that fit along two axes."""
    if not (first.flags.c_contiguous and other.flags.c_contiguous):
        check_contiguous(name, first, other)
    if (
        not first.ndim == other.ndim == 2
        or first.dtype != other.dtype
        or first.shape[axis] != other.shape[axis_of_other]
    ):
        expected = (
            f"matrices of one dtype, axis {axis} of the first as long as axis "
            f"{axis_of_other} of the other"
        )
        raise _unequal(name, first, other, expected)


def check_ids(ids: DeviceArray) -> None:
    """Raise ArgumentError unless device ids are of a dtype that the kernels read."""
    if ids.dtype.name not in ("int32", "int64"):
        raise ArgumentError(
            "ids on a GPU have the wrong dtype",
            found=ids.dtype.name,
            expected="int32 or int64",
            remedy="convert them",
        )


def _unequal(name: str, first: DeviceArray, other: DeviceArray, expected: str) -> ArgumentError:
    return ArgumentError(
        f"kernels.{name} was given arrays that do not fit",
        found=f"{first.dtype.name} {first.shape} and {other.dtype.name} {other.shape}",
        expected=expected,
    )
