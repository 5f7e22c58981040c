"""Copies, casts and sums of device arrays with any strides."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe.arrays.cuda import cuda_function
from mpipipe.arrays.memory import address, empty

MOVES, FILL = (Path(__file__).with_name(f"{name}.cu") for name in ("strided", "fill"))
THREADS = 256
NEIGHBOURS = (8, 4, 2)  # elements of the last axis that may move together
LONGEST = 32  # bytes: the longest word of memory, of which older GPUs make two


def steps(x) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(stride // x.itemsize for stride in x.strides)


def blocks_of(count: int, per_block: int) -> tuple[int]:
    """The grid for so many items."""
    return (-(-count // per_block),)


def move(source, target, add: bool = False):
    """target = source or, with `add`, target += source: equal shapes of at most 5 axes, any strides, float dtypes."""
    move_strided(source, steps(source), target, steps(target), target.shape, add)


def move_strided(source, source_steps, target, target_steps, shape, add: bool = False):
    """As `move`, for views given by the arrays where they begin, their strides in elements, and one shape."""
    count = int(np.prod(shape))
    if not count:
        return
    free = 5 - len(shape)
    shape = (*[1] * free, *shape)
    strides = [(*[0] * free, *found) for found in (source_steps, target_steps)]
    together = _together(source, strides[0], target, strides[1], shape)
    reach = max(_reach(shape, found) for found in strides)
    index = np.dtype(np.int32 if max(reach, count) < 2**31 - THREADS else np.int64)
    kernel = cuda_function(MOVES, "move", S=source.dtype, U=target.dtype, I=index, V=together)
    numbers = [count // together, *shape[1:4], shape[4] // together]
    for found in strides:
        numbers += [*found[:4], found[4] * together]
    arguments = (source, target, *map(index.type, numbers), np.int32(add))
    kernel(blocks_of(count // together, THREADS), (THREADS,), arguments)


def _reach(shape, strides) -> int:
    return sum(abs(stride) * (extent - 1) for extent, stride in zip(shape, strides))


def _together(source, source_steps, target, target_steps, shape) -> int:
    """How many neighbours along the last axis can move as one word on both sides."""
    if source_steps[4] != 1 or target_steps[4] != 1:
        return 1
    for count in NEIGHBOURS:
        fits = shape[4] % count == 0
        for array, strides in ((source, source_steps), (target, target_steps)):
            word = count * array.itemsize
            fits = fits and word <= LONGEST and address(array) % word == 0
            fits = fits and all(s % count == 0 for s, extent in zip(strides[:4], shape) if extent > 1)
        if fits:
            return count
    return 1


def copied(x, kind=None):
    """A new C-contiguous array with the values of x, which may have any strides, in dtype `kind`."""
    new = empty(x.shape, x.dtype if kind is None else kind, "cuda")
    move(x, new)
    return new


def fill(x, value: float):
    """Set all elements of a C-contiguous array."""
    if x.size:
        kernel = cuda_function(FILL, "fill", T=x.dtype)
        kernel(blocks_of(x.size, THREADS), (THREADS,), (x, np.int64(x.size), x.dtype.type(value)))
