"""Attention results over several blocks of keys on a GPU, kept apart until one kernel merges them.

Merging block by block would read and write the sum of all blocks each time, in the accumulator dtype: 10 bytes an
element for blocks in half precision. Merging BLOCKS at once reads each block once and touches the sum twice in all. Up
to BLOCKS blocks become the rounded result without any sum. The price is memory: so many outputs exist at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.strided import THREADS, blocks_of
from mpipipe.attention.kernels.interface import Result

MERGE = Path(__file__).with_name("merge.cu")
BLOCKS = 4  # blocks that the kernel takes


class _Pending(NamedTuple):
    """The result of one block, which sees rows start ... stop - 1: four arguments of the kernel."""

    out: DeviceArray
    lse: DeviceArray
    start: np.int32
    stop: np.int32


class PendingBlocks:
    """The result over the blocks so far of queries like q, with values like v.

    Parameters
    ----------
    q, v : device arrays (batch, seq, heads, dim) and (batch, keys, kv_heads, value_dim)
    earlier : result over earlier blocks, C-contiguous, `out` in the accumulator dtype
    """

    def __init__(self, q: DeviceArray, v: DeviceArray, earlier: Result | None = None) -> None:
        self._shape = *q.shape[:3], v.shape[3]
        self._dtype, self._sum_dtype = q.dtype, arrays.accumulator(q.dtype)
        self._sum = earlier
        self._blocks: list[_Pending] = []

    def block(self, start: int, stop: int) -> Result:
        """Return memory for the result of one more block, which sees rows start ... stop - 1.

        out (batch, stop - start, heads, value_dim) is of the dtype of q. Set both arrays before the next call.
        """
        if len(self._blocks) == BLOCKS:
            self._sum = self._merged(self._sum or self._empty(self._sum_dtype))
        batch, _, heads, dim = self._shape
        out = arrays.empty((batch, stop - start, heads, dim), self._dtype, "cuda")
        lse = arrays.empty((batch, heads, stop - start), self._sum_dtype, "cuda")
        self._blocks.append(_Pending(out, lse, np.int32(start), np.int32(stop)))
        return Result(out, lse)

    def merged(self) -> Result:
        """Return the result over all blocks in new memory, out in the dtype of q."""
        return self._merged(self._empty(self._dtype))

    def merge_in_place(self) -> None:
        """Merge all blocks into the earlier result that was given."""
        if self._blocks and self._sum is not None:
            self._merged(self._sum)

    def _empty(self, dtype: np.dtype) -> Result:
        batch, seq, heads, _ = self._shape
        lse = arrays.empty((batch, heads, seq), self._sum_dtype, "cuda")
        return Result(arrays.empty(self._shape, dtype, "cuda"), lse)

    def _merged(self, target: Result) -> Result:
        """Write all blocks and the sum to `target`, and drop the blocks."""
        out, lse = target
        batch, seq, heads, dim = self._shape
        rows = batch * seq * heads
        if rows:
            dtypes = dict(T=self._dtype, O=out.dtype, A=self._sum_dtype)
            vector_width = 4 if dim % 4 == 0 and dim >= 128 else 2 if dim % 2 == 0 else 1
            # the kernel always takes BLOCKS blocks; it reads no block without rows, and no sum that is missing
            nothing = _Pending(arrays.empty((1,), self._dtype, "cuda"), lse, np.int32(0), np.int32(0))
            given = [x for block in [*self._blocks, *[nothing] * (BLOCKS - len(self._blocks))] for x in block]
            kernel = arrays.cuda_function(MERGE, "merge", **dtypes, V=vector_width)
            kernel(
                blocks_of(rows, THREADS // 32), (THREADS,),
                (*given, *(self._sum or (lse, lse)), np.int32(self._sum is not None), out, lse, np.int64(rows),
                 *map(np.int32, (heads, seq, dim))),
            )  # fmt: skip
        self._blocks = []
        return target
