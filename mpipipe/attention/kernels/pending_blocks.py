"""Attention results over several blocks of keys on a GPU, kept apart until one kernel makes one of them.

Merging block by block reads and writes the sum of all blocks each time, in the accumulator dtype: 10 bytes an element
for blocks in half precision. Merging BLOCKS at once reads each block once and touches the sum twice in all, and up to
BLOCKS blocks become the rounded result without any sum; for that, so many outputs lie in memory at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays.strided import THREADS, blocks_of

MERGE = Path(__file__).with_name("merge.cu")
BLOCKS = 4  # as many as the kernel takes


class PendingBlocks:
    """The result over the blocks so far of queries like q, with values like v.

    sum : (out, lse) over earlier blocks, C-contiguous, out in the accumulator dtype; None where there is none
    """

    def __init__(self, q, v, sum=None):
        self.shape = *q.shape[:3], v.shape[3]
        self.kind, self.sum_kind = q.dtype, arrays.accumulator(q.dtype)
        self.sum = sum
        self.blocks: list[tuple] = []

    def block(self, start: int, stop: int):
        """(out, lse) without values for one more block, which sees rows start ... stop - 1: set them before the next.

        out (batch, stop - start, heads, dim of v) of the dtype of q, lse (batch, heads, stop - start).
        """
        if len(self.blocks) == BLOCKS:
            self.sum = self._merged(self.sum or self._empty(self.sum_kind))
        batch, _, heads, dim = self.shape
        out = arrays.empty((batch, stop - start, heads, dim), self.kind, "cuda")
        lse = arrays.empty((batch, heads, stop - start), self.sum_kind, "cuda")
        self.blocks.append((out, lse, np.int32(start), np.int32(stop)))
        return out, lse

    def merged(self):
        """(out, lse) over all blocks, in new memory, out in the dtype of q: zeros and -inf where there are none."""
        return self._merged(self._empty(self.kind))

    def merge_in_place(self):
        """Merge all blocks into the sum that was given."""
        if self.blocks:
            self._merged(self.sum)

    def _empty(self, kind):
        batch, seq, heads, _ = self.shape
        return arrays.empty(self.shape, kind, "cuda"), arrays.empty((batch, heads, seq), self.sum_kind, "cuda")

    def _merged(self, target):
        """All blocks and the sum, written to `target`; none is left then."""
        out, lse = target
        batch, seq, heads, dim = self.shape
        rows = batch * seq * heads
        if rows:
            kinds = dict(T=self.kind, O=out.dtype, A=self.sum_kind)
            together = 4 if dim % 4 == 0 and dim >= 128 else 2 if dim % 2 == 0 else 1
            # where there is no block there is one of no rows, and no sum is any array: the kernel does not look at them
            nowhere = arrays.empty((1,), self.kind, "cuda"), lse, np.int32(0), np.int32(0)
            given = [x for block in [*self.blocks, *[nowhere] * (BLOCKS - len(self.blocks))] for x in block]
            kernel = arrays.cuda_function(MERGE, "merge", **kinds, V=together)
            kernel(
                blocks_of(rows, THREADS // 32), (THREADS,),
                (*given, *(self.sum or (lse, lse)), np.int32(self.sum is not None), out, lse, np.int64(rows),
                 *map(np.int32, (heads, seq, dim))),
            )  # fmt: skip
        self.blocks = []
        return target
