"""Attention over one block of keys, or over several by merging their results in place.

`InPlaceAccumulator` and `block_gradients` serve every kernel that has no better way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, is_device, strided
from mpipipe.attention.kernels.interface import AttentionKernel, Block, Gradients, Result
from mpipipe.attention.mask import each_row_once


def uninitialised_result(q: Array, v: Array, dtype: np.dtype) -> Result:
    """Memory for the result of queries like `q` with values like `v`, `out` in `dtype`."""
    batch, seq, heads, _ = q.shape
    device = arrays.device_of(q)
    out = arrays.empty((batch, seq, heads, v.shape[3]), dtype, device)
    return Result(out, arrays.empty((batch, heads, seq), arrays.accumulator(q.dtype), device))


def empty_result(q: Array, v: Array, dtype: np.dtype) -> Result:
    """The result over no keys at all: zeros in `dtype`, and -inf."""
    result = uninitialised_result(q, v, dtype)
    arrays.set_zero(result.out)
    fill(result.lse, -np.inf)
    return result


class InPlaceAccumulator:
    """Merge each block into one result.

    Parameters
    ----------
    forward : of the kernel
    q, v, overwrite : as for AttentionKernel.make_accumulator
    """

    def __init__(self, forward: Callable[[Block, Result, bool], None], q: Array, v: Array, overwrite: bool) -> None:
        self._forward, self._dtype, self._overwrite = forward, q.dtype, overwrite
        make = uninitialised_result if overwrite else empty_result
        self._result = make(q, v, arrays.accumulator(q.dtype))

    def attend(self, block: Block) -> None:
        """Merge one block."""
        self._forward(block, self._result, self._overwrite)
        self._overwrite = False

    def end(self) -> Result:
        """Return the result over all blocks, out in the dtype of the queries."""
        return self._result._replace(out=cast(self._result.out, self._dtype))


def block_gradients(
    backward: Callable[[Block, Array, Result, Gradients], None], block: Block, dout: Array, result: Result, dq: Array
) -> tuple[Array, Array]:
    """`AttentionKernel.block_gradients` by the kernel's `backward`, from zeros."""
    dtype = result.lse.dtype
    dk, dv = (arrays.zeros(x.shape, dtype, arrays.device_of(x)) for x in (block.k, block.v))
    backward(block, dout, result, Gradients(dq, dk, dv))
    return dk, dv


def attend_once(kernel: AttentionKernel, block: Block) -> Result:
    """Attend to a single block of keys."""
    q, v = block.q, block.v
    if each_row_once(block.slices, q.shape[1]):
        result = uninitialised_result(q, v, q.dtype)
        kernel.forward(block, result, True)
        return result
    accumulator = kernel.make_accumulator(q, v, overwrite=False)
    accumulator.attend(block)
    return accumulator.end()


def cast(x: Array, dtype: np.dtype) -> Array:
    """Return x itself if it is of this dtype, else a C-contiguous copy that is."""
    if x.dtype == dtype:
        return x
    return strided.copied(x, dtype) if is_device(x) else x.astype(dtype)


def strided_copy(target: Array, source: Array) -> None:
    """Target = source: equal shapes, on one device."""
    if is_device(target):
        strided.strided_copy(source, target)
    else:
        target[...] = source


def strided_add(target: Array, source: Array) -> None:
    """Target += source: equal shapes, on one device."""
    if is_device(target):
        strided.strided_copy(source, target, add=True)
    else:
        np.add(target, source, out=target)


def fill(x: Array, value: float) -> None:
    """Set all elements of a C-contiguous array."""
    if is_device(x):
        strided.fill(x, value)
    else:
        x.fill(value)
