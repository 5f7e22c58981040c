"""How the CuPy kernel cuts attention into problems, and slices into tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.arrays.strided import element_strides, strided_copy_views
from mpipipe.attention.mask import Slice

TILE_BYTES = 32 << 20  # of the scores of one tile of all problems; an H200 has 60 MB of second-level cache
KEYS = 1024  # columns of a tile at most
ROWS = 128  # rows of a tile at least, if there are more columns than rows


class RowTile(NamedTuple):
    """Queries start ... stop - 1 of a slice, and the pieces of keys that they see, counted from its first."""

    start: int
    stop: int
    pieces: list[slice]


def row_tiles(part: Slice, queries: int, keys: int) -> Iterator[RowTile]:
    """Tiles of so many queries of a slice, in pieces of so many keys."""
    seq, all_keys = part.q_stop - part.q_start, part.k_stop - part.k_start
    for start in range(0, seq, queries):
        stop = min(start + queries, seq)
        first = 0 if part.low is None else max(0, start + part.low)
        end = all_keys if part.high is None else min(all_keys, stop + part.high)
        pieces = [slice(at, min(at + keys, end)) for at in range(first, end, keys)]
        yield RowTile(start, stop, pieces or [slice(0, min(keys, all_keys))])  # rows that see nothing have a result too


class Problem:
    """How (batch, seq, heads, dim) arrays become problems of rows.

    Attributes
    ----------
    count : number of problems, batch * kv_heads
    group : query heads to a key head
    """

    def __init__(self, q: Array, k: Array) -> None:
        self.batch, self.seq, heads, _ = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.group = heads // self.kv_heads
        self.count = self.batch * self.kv_heads

    def rows(self, part: Slice, tile: RowTile) -> slice:
        """Rows of the queries of a tile of a slice."""
        return slice((part.q_start + tile.start) * self.group, (part.q_start + tile.stop) * self.group)

    def rows_of(self, x: Array) -> Array:
        """(batch, seq, heads, dim) copied to (problems, seq * group, dim)."""
        target = self.like_rows(x, x.dtype)
        shape, target_steps, source_steps = self.as_rows(target, x)
        strided_copy_views(x, source_steps, target, target_steps, shape)
        return target

    def keys_of(self, x: Array) -> Array:
        """(batch, keys, kv_heads, dim) copied to (problems, keys, dim)."""
        target = self.like_keys(x, x.dtype)
        shape, target_steps, source_steps = self.as_keys(target, x)
        strided_copy_views(x, source_steps, target, target_steps, shape)
        return target

    def like_rows(self, x: Array, dtype: np.dtype) -> Array:
        """Memory (problems, seq * group, dim)."""
        return arrays.empty((self.count, self.seq * self.group, x.shape[3]), dtype, "cuda")

    def like_keys(self, x: Array, dtype: np.dtype) -> Array:
        """Memory (problems, keys, dim)."""
        return arrays.empty((self.count, self.keys, x.shape[3]), dtype, "cuda")

    def as_rows(self, rows: Array, x: Array) -> tuple[Shape, Shape, Shape]:
        """(shape, steps of `rows`, steps of x) over (batch, kv_heads, seq, group, dim)."""
        per_row, dim = rows.shape[2], x.shape[3]
        per_problem = self.seq * self.group * per_row
        b, s, h, d = element_strides(x)
        shape = self.batch, self.kv_heads, self.seq, self.group, dim
        ours = self.kv_heads * per_problem, per_problem, self.group * per_row, per_row, 1
        return shape, ours, (b, h * self.group, s, h, d)

    def as_keys(self, rows: Array, x: Array) -> tuple[Shape, Shape, Shape]:
        """(shape, steps of `rows`, steps of x) over (batch, kv_heads, keys, dim)."""
        dim = x.shape[3]
        b, s, h, d = element_strides(x)
        ours = self.kv_heads * self.keys * dim, self.keys * dim, dim, 1
        return (self.batch, self.kv_heads, self.keys, dim), ours, (b, h, s, d)

    def tile(self, slices: Sequence[Slice], bytes_per_score: int) -> tuple[int, int]:
        """(rows, columns) of a tile, in whole groups of rows: TILE_BYTES, or ROWS x ROWS of all problems if more."""
        scores = TILE_BYTES // (self.count * bytes_per_score)
        keys = min(KEYS, max(part.k_stop - part.k_start for part in slices))
        keys = max(1, min(keys, max(scores // ROWS, ROWS)))
        queries = max(1, max(scores // keys, ROWS) // self.group)
        queries = min(queries, max(part.q_stop - part.q_start for part in slices))
        return queries * self.group, keys
