"""Copies, casts and sums of arrays with any strides, on the device by kernels of our own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpipipe.arrays.cuda import Launch, Packed, bitwise_or, cuda_function, over, vector_width
from mpipipe.arrays.dtypes import Array, DeviceArray, Shape, Tree, is_device
from mpipipe.arrays.memory import copy_into, empty, empty_like
from mpipipe.arrays.trees import flatten, unflatten

STRIDED = Path(__file__).with_name("strided.cu")
FILL = Path(__file__).with_name("fill.cu")
THREADS = 256
AXES = 5  # loops of strided.cu


def element_strides(x: DeviceArray) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple([stride // x.itemsize for stride in x.strides])


def blocks_of(count: int, per_block: int) -> tuple[int]:
    """Return the grid in which each of `count` items has a place of its own."""
    return (-(-count // per_block),)


def strided_copy(source: Array, target: Array, add: bool = False) -> None:
    """Set target = source or, with `add`, target += source: equal shapes, any strides.

    On a GPU: floats of at most 5 axes.

    Values are rounded to the dtype of the target.
    """
    plain = not add and source.dtype == target.dtype
    if isinstance(target, np.ndarray):
        if add:
            np.add(target, source, out=target)
        else:
            target[...] = source
    elif plain and source.flags.c_contiguous and target.flags.c_contiguous:
        copy_into(target, source)
    else:
        _copies((source, target), (), (add,))


def _pack_copy(source: DeviceArray, target: DeviceArray, add: bool) -> Launch | None:
    return _pack_views(
        source, target, element_strides(source), element_strides(target), target.shape, add
    )


def strided_copy_views(
    source: DeviceArray,
    source_strides: Shape,
    target: DeviceArray,
    target_strides: Shape,
    shape: Shape,
    add: bool = False,
) -> None:
    """Copy as `strided_copy` between views: the array where each begins, and its strides.

    Strides count elements.
    """
    _views((source, target), (), (source_strides, target_strides, shape, add))


def _pack_views(
    source: DeviceArray,
    target: DeviceArray,
    source_strides: Shape,
    target_strides: Shape,
    shape: Shape,
    add: bool,
) -> Launch | None:
    count = math.prod(shape)
    if not count:
        return None
    walk = _walk(shape, source_strides, target_strides)
    width = vector_width(source, target, divides=walk.divides) if walk.divides else 1
    numbers = (walk.index(count // width), *walk.numbers, np.int32(add))
    dtypes = dict(S=source.dtype, U=target.dtype, I=np.dtype(walk.index))
    return over(STRIDED, "strided_copy", count, numbers, V=width, **dtypes)


_copies = Packed(_pack_copy)
_views = Packed(_pack_views)


class _Walk(NamedTuple):
    """The order in which a kernel visits the elements of two arrays."""

    # Extents but the first, strides of the source, strides of the target.
    numbers: tuple[object, ...]
    index: Any  # numpy integer type that holds every offset
    divides: int  # a multiple of the width of a word; 0: words are single elements


def _walk(shape: Shape, source_strides: tuple[int, ...], target_strides: tuple[int, ...]) -> _Walk:
    """Order axes by the target's memory, and join neighbours where both arrays allow it."""
    axes = [axis for axis in zip(shape, source_strides, target_strides) if axis[0] > 1]
    axes.sort(key=lambda axis: -abs(axis[2]))
    joined: list[tuple[int, int, int]] = []
    for extent, source, target in axes:
        if joined and joined[-1][1:] == (extent * source, extent * target):
            joined[-1] = (joined[-1][0] * extent, source, target)
        else:
            joined.append((extent, source, target))
    joined = [(1, 0, 0)] * (AXES - len(joined)) + joined
    extents, sources, targets = zip(*joined)
    farthest = math.prod(shape)
    for steps in (sources, targets):
        farthest = max(farthest, sum(abs(step) * (n - 1) for n, step in zip(extents, steps)))
    index = np.int32 if farthest < 2**31 else np.int64
    together = sources[-1] == targets[-1] == 1
    divides = bitwise_or(extents[-1:], sources[:-1], targets[:-1]) if together else 0
    return _Walk(tuple(map(index, (*extents[1:], *sources, *targets))), index, divides)


def copied(x: Array, dtype: DTypeLike | None = None) -> Array:
    """Return a new C-contiguous array with the values of x, in `dtype` or its own."""
    new = empty_like(x, dtype)
    strided_copy(x, new)
    return new


def concatenate(parts: Sequence[Array], axis: int = 0) -> Array:
    """Put C-contiguous arrays of one dtype and device together along an axis."""
    shape = [*parts[0].shape]
    shape[axis] = sum(part.shape[axis] for part in parts)
    if isinstance(parts[0], np.ndarray):  # numpy would keep the order of axes in memory
        return np.concatenate(parts, axis, out=np.empty(shape, parts[0].dtype))
    whole = empty(tuple(shape), parts[0].dtype, "cuda")
    start = 0
    for part in parts:
        stop = start + part.shape[axis]
        place = (slice(None),) * axis + (slice(start, stop),)
        strided_copy(part, whole[place])
        start = stop
    return whole


def in_c_order(tree: Tree) -> Tree:
    """Return `tree` with a copy for each array that is not in C order."""
    leaves, structure = flatten(tree)
    ordered = []
    is_copied = False
    for leaf in leaves:
        # Other things are refused where they are sent.
        if (type(leaf) is np.ndarray or is_device(leaf)) and not leaf.flags.c_contiguous:
            leaf = copied(leaf)
            is_copied = True
        ordered.append(leaf)
    if is_copied:
        return unflatten(ordered, structure)
    return tree


def cast(x: Array, dtype: np.dtype) -> Array:
    """Return x itself if it is of this dtype, else a C-contiguous copy that is, on the same device.

    What is too large becomes infinite without a warning.
    """
    if x.dtype == dtype:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        return copied(x, dtype)


def fill(x: Array, value: float) -> None:
    """Set all elements of a C-contiguous array."""
    if isinstance(x, np.ndarray):
        x.fill(value)
    elif x.size:
        kernel = cuda_function(FILL, "fill", T=x.dtype)
        kernel(blocks_of(x.size, THREADS), (THREADS,), (x, np.int64(x.size), x.dtype.type(value)))
