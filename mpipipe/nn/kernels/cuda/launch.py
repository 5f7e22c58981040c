"""What the functions on a GPU share: the sizes of words and grids, and the start of kernels over flat arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.errors import ArgumentError

FOLDER = Path(__file__).parent
WORD = 16  # bytes: the widest load of one thread
BLOCK = 256  # threads of a block without a reason for another number
MOST_BLOCKS = 1 << 20  # of one grid; kernels that may have more to do come back for it


def word(first, *others, divides: int = 0) -> int:
    """How many elements of these arrays can move as one word of memory: a power of two that divides `divides`.

    All addresses must allow it; 16 bytes of the widest dtype are the most.
    """
    limits, widest = divides | first.data.ptr // first.itemsize, first.itemsize
    for array in others:
        limits |= array.data.ptr // array.itemsize
        widest = max(widest, array.itemsize)
    limits |= WORD // widest
    return limits & -limits


def any_bit(*groups) -> int:
    """The bits set in any of the numbers: what divides all of them, as far as `word` looks, divides this."""
    bits = 0
    for group in groups:
        for number in group:
            bits |= number
    return bits


def grid(count: int, share: int) -> tuple[int]:
    """A grid for `count` items, of which one block takes `share` at a time."""
    return (min(-(-count // share), MOST_BLOCKS),)


def scalar(kind: np.dtype) -> Callable:
    """The numpy scalar in which numbers are handed to kernels for arrays of dtype `kind`: one of accumulator(kind)."""
    return np.float64 if kind.itemsize == 8 else np.float32


def over(source: Path, name: str, size: int, args: tuple, words: int = 2, **facts) -> None:
    """Start a kernel over `size` elements, of which each thread takes `words` words of V elements at a time."""
    if size:
        arrays.cuda_function(source, name, **facts)(grid(-(-size // facts["V"]), words * BLOCK), (BLOCK,), args)


def check_contiguous(name: str, *given) -> None:
    """Raise ArgumentError unless all arrays are C-contiguous."""
    for array in given:
        if not array.flags.c_contiguous:
            raise ArgumentError(
                f"kernels.{name} takes C-contiguous arrays on a GPU",
                found=f"shape {array.shape}, strides {array.strides}",
                remedy="copy it first, with kernels.copy",
            )


def check_alike(name: str, first, *others) -> None:
    """Raise ArgumentError unless all arrays are C-contiguous, of one shape and dtype."""
    check_contiguous(name, first, *others)
    for array in others:
        if array.shape != first.shape or array.dtype != first.dtype:
            raise _unequal(name, first, array, "one shape and one dtype")


def check_matrices(name: str, first, axis: int, other, axis_of_other: int) -> None:
    """Raise ArgumentError unless both are C-contiguous matrices of one dtype, of equal extents along these axes."""
    check_contiguous(name, first, other)
    if (
        not first.ndim == other.ndim == 2
        or first.dtype != other.dtype
        or first.shape[axis] != other.shape[axis_of_other]
    ):
        expected = f"matrices of one dtype, axis {axis} of the first as long as axis {axis_of_other} of the other"
        raise _unequal(name, first, other, expected)


def _unequal(name, first, other, expected) -> ArgumentError:
    found = " and ".join(f"{array.dtype.name} {array.shape}" for array in (first, other))
    return ArgumentError(f"kernels.{name} was given arrays that do not fit", found=found, expected=expected)
