"""The arithmetic on the host, with numpy.

`any_dtype` takes every dtype, `full_precision` float32 and float64.

Work on large arrays is cut into pieces, which the threads of this rank share (`processor.each`).
Pieces depend on sizes alone, and sums over pieces are made in their order: so all results have the
same bits for any number of threads.

A piece is one of 2, 4, 8, ... equal ones, and as large as the third-level cache allows. Between two
calls of numpy a thread needs the interpreter, and where another one has it, is put to sleep and
woken up, which takes 5 to 20 microseconds. So two threads on pieces of 128 KiB are as slow as one,
and on pieces of 1 MiB 1.5 to 1.8 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

import numpy as np

from mpipipe.processor import each

HostArray: TypeAlias = np.ndarray

ELEMENTS = 1 << 18  # most elements of a piece: 1 MiB of float32
# Elements: pieces of flat arrays begin at multiples, so that no two threads write to one line of
# the cache.
LINE = 64


def blocks(count: int, width: int = 1) -> list[slice]:
    """Cut `count` rows of `width` elements into equal pieces of about `ELEMENTS` at most.

    There are a power of two of them, but for rounding.
    """
    size = count * width or count
    if size <= ELEMENTS:
        if count:
            return [slice(0, count)]
        return []
    step = -(-count // (1 << ((size - 1) // ELEMENTS).bit_length()))
    if width <= 1:
        step += -step % LINE
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def elementwise(function: Callable[..., object], out: HostArray, *inputs: HostArray) -> HostArray:
    """Call function(*inputs, out=out) on pieces of arrays of one shape; return `out`."""
    if out.size <= ELEMENTS:
        function(*inputs, out=out)
        return out
    count = len(blocks(out.size))
    axis = next(
        (i for i, length in enumerate(out.shape) if length >= count), int(np.argmax(out.shape))
    )
    before = (slice(None),) * axis

    def work(at: slice) -> None:
        place = (*before, at)
        function(*(x[place] for x in inputs), out=out[place])

    each(work, blocks(out.shape[axis], prod(out.shape) // out.shape[axis]))
    return out
