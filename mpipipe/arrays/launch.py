"""The start of kernels over flat arrays: how wide their words of memory are, and how large their grids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpipipe.arrays.cuda import cuda_function
from mpipipe.arrays.types import DeviceArray

WORD = 16  # bytes: the widest load of one thread
BLOCK = 256  # threads of a block without a reason for another number
MOST_BLOCKS = 1 << 20  # of one grid; the threads of a kernel with more to do come back for it


class Call(NamedTuple):
    """A launch without its arrays.

    function : as `cuda_function` returns it
    numbers : the parameters behind the arrays, in their types
    """

    function: Callable
    grid: tuple[int, ...]
    block: tuple[int, ...]
    numbers: tuple[Any, ...] = ()

    def launch(self, given: tuple[DeviceArray, ...], varying: tuple[Any, ...] = ()) -> None:
        """Launch with these arrays, and with more numbers behind its own."""
        self.function(self.grid, self.block, (*given, *self.numbers, *varying))


def vector_width(first: DeviceArray, *others: DeviceArray, divides: int = 0) -> int:
    """Return how many elements of these arrays can move as one word of memory: a power of two that divides `divides`.

    All addresses must allow it. A word has at most 16 bytes of the widest dtype.
    """
    limits, widest = divides | first.data.ptr // first.itemsize, first.itemsize
    for array in others:
        limits |= array.data.ptr // array.itemsize
        widest = max(widest, array.itemsize)
    limits |= WORD // widest
    return limits & -limits


def bitwise_or(*groups: Iterable[int]) -> int:
    """Bitwise OR of all numbers. A power of two divides it exactly if it divides each of them."""
    bits = 0
    for group in groups:
        for number in group:
            bits |= number
    return bits


def grid(count: int, per_block: int) -> tuple[int]:
    """Return the grid for `count` items, of which one block takes `per_block` at a time."""
    return (min(-(-count // per_block), MOST_BLOCKS),)


def scalar_type(dtype: np.dtype) -> Any:
    """Return the numpy type of the numbers that a kernel for arrays of `dtype` takes: that of its accumulator."""
    return np.float64 if dtype.itemsize == 8 else np.float32


def launch(
    source: Path, name: str, size: int, arguments: tuple[Any, ...], *, V: int, words: int = 2, **dtypes: np.dtype
) -> None:
    """Start a kernel over `size` elements, where a thread takes `words` words of V elements at a time.

    The source is compiled for V and the dtypes, as `cuda_function` says.
    """
    call = over(source, name, size, arguments, V=V, words=words, **dtypes)
    if call is not None:
        call.launch(())


def over(
    source: Path, name: str, size: int, numbers: tuple[Any, ...] = (), *, V: int, words: int = 2, **dtypes: np.dtype
) -> Call | None:
    """Return the call of a kernel over `size` elements, with these numbers behind its arrays; None for 0 elements."""
    if not size:
        return None
    return Call(cuda_function(source, name, **dtypes, V=V), grid(-(-size // V), words * BLOCK), (BLOCK,), numbers)
