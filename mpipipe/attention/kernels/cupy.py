"""Exact attention on a GPU for any dtype and head dimension: products of tiles by cuBLAS.

Each (batch entry, key head) is one problem, and one product does a tile of all problems at once.
The query heads that share a key head are its rows, side by side: row i g + h is query i of head h
of the group. So keys and values are never repeated. A tile of scores stays in the second-level
cache between the products. One kernel between the products of the forward does all the rest of the
online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and one
kernel between those of the backward does its part.

In half precision the factors of products are halves, probabilities included, and all sums are
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import (
    THREADS,
    Array,
    Launch,
    Packed,
    Shape,
    batched_gemm,
    blocks_of,
    element_strides,
    strided_copy_views,
)
from mpipipe.attention.kernels.interface import Gradients, KVBlock, OutLse, RowTile, row_tiles
from mpipipe.attention.mask import Slice


def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`; with `overwrite`, `out` may also be of the dtype of `lse`."""
    if not block.slices:
        return
    problem = HeadProblems(block)
    queries, keys, values = map(problem.copied, (block.q, block.k, block.v))
    dtype = arrays.accumulator(queries.dtype)
    row_count, key_count = problem.tile(block.slices, dtype.itemsize)
    scores, weights = _tile_pair(problem.count, row_count, key_count, queries.dtype)
    sums = arrays.empty((problem.count, row_count, values.shape[2]), dtype, "cuda")
    # The maximum and the sum of each row.
    state = tuple([arrays.empty((problem.count, row_count), dtype, "cuda") for _ in range(2)])
    for part in block.slices:
        for tile in row_tiles(part, row_count // problem.group, key_count):
            rows = problem.rows(tile)
            count = rows.stop - rows.start
            tile_sums = _front(sums, count)
            for piece in tile.pieces:
                at = slice(part.k_start + piece.start, part.k_start + piece.stop)
                columns = piece.stop - piece.start
                first = piece is tile.pieces[0]
                tile_scores = _front(scores, count, columns)
                factors = _front(weights, count, columns)
                batched_gemm(queries[:, rows], keys[:, at], tile_scores, transpose_b=True)
                options = (
                    tile.start,
                    piece.start,
                    part.low,
                    part.high,
                    block.scale,
                    first,
                    result.out.dtype,
                )
                _online_softmax((tile_scores, factors, tile_sums), state, (problem.group, *options))
                batched_gemm(factors, values[:, at], tile_sums, add=not first)
            place = problem.group, problem.kv_heads, part.q_start + tile.start
            _normalise((tile_sums, *state, *result), (), (*place, overwrite, queries.dtype))
            block.poll()


def backward(
    block: KVBlock, dout: Array, result: OutLse, gradients: Gradients, overwrite: bool = False
) -> None:
    """As `AttentionKernel.backward`."""
    inputs = block.q, block.k, block.v
    dtype = arrays.accumulator(block.q.dtype)
    problem = HeadProblems(block)
    walks = [_walk(problem.kv_heads, x.shape, x.strides, x.itemsize) for x in gradients]
    sums = Gradients(*[arrays.empty(walk[0], dtype, "cuda") for walk in walks])
    for each in sums:
        arrays.set_zero(each)
    if block.slices:
        delta = arrays.empty(result.lse.shape, dtype, "cuda")
        _dot((dout, result.out), (delta,))
        factors = tuple(map(problem.copied, (dout, *inputs)))
        _backward_tiles(problem, factors, (result.lse, delta), block, sums)
    for each, target, (_, whole, ours, its) in zip(sums, gradients, walks):
        strided_copy_views(each, ours, target, its, whole, add=not overwrite)


def _backward_tiles(
    problem: HeadProblems,
    factors: tuple[Array, ...],
    of_rows: tuple[Array, Array],
    block: KVBlock,
    sums: Gradients,
) -> None:
    """Add to `sums`. `factors` are dout, q, k and v as problems.

    `of_rows` are lse and delta, (batch, heads, seq).
    """
    dout, q, k, v = factors
    dq, dk, dv = sums
    lse, delta = of_rows
    row_count, key_count = problem.tile(block.slices, 2 * dq.itemsize)
    # Scores and weights, then products and their slopes.
    memory: list[Array] = []
    for _ in range(2):
        memory += _tile_pair(problem.count, row_count, key_count, q.dtype)
    for part in block.slices:
        for tile in row_tiles(part, row_count // problem.group, key_count):
            rows = problem.rows(tile)
            for piece in tile.pieces:
                at = slice(part.k_start + piece.start, part.k_start + piece.stop)
                size = rows.stop - rows.start, piece.stop - piece.start
                scores, weights, products, slopes = [_front(x, *size) for x in memory]
                batched_gemm(q[:, rows], k[:, at], scores, transpose_b=True)
                batched_gemm(dout[:, rows], v[:, at], products, transpose_b=True)
                place = problem.seq, part.q_start, tile.start, piece.start, part.low, part.high
                options = problem.group, problem.kv_heads, *place, block.scale
                _softmax_backward((scores, products, weights, slopes, lse), (delta,), options)
                batched_gemm(weights, dout[:, rows], dv[:, at], transpose_a=True, add=True)
                batched_gemm(
                    slopes, q[:, rows], dk[:, at], transpose_a=True, add=True, factor=block.scale
                )
                batched_gemm(slopes, k[:, at], dq[:, rows], add=True, factor=block.scale)
            block.poll()


def _tile_pair(count: int, rows: int, keys: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Return memory for a tile in the accumulator dtype and in `dtype`, which may be the same."""
    shape = count, rows, -(-keys // 8) * 8
    sum_dtype = arrays.accumulator(dtype)
    sums = arrays.empty(shape, sum_dtype, "cuda")
    return sums, sums if sum_dtype == dtype else arrays.empty(shape, dtype, "cuda")


def _front(x: Array, rows: int, columns: int | None = None) -> Array:
    """Return a smaller matrix at the front of each tile, with rows as far apart as before."""
    pitch = x.shape[2]
    flat = x.reshape(-1)[: x.shape[0] * rows * pitch].reshape(x.shape[0], rows, pitch)
    if columns is None:
        return flat
    return flat[:, :, :columns]


# -- Launches of the kernels in forward.cu and backward.cu -----------------------------------------


FORWARD, BACKWARD = (Path(__file__).with_name(f"{name}.cu") for name in ("forward", "backward"))
HELD = 4  # columns that one thread of the forward holds
FAR = 1 << 30  # a bound that bounds nothing


@Packed
def _online_softmax(
    scores: Array, weights: Array, sums: Array, _row_max: Array, _row_sum: Array, *facts: Any
) -> Launch:
    """Turn a tile of scores into exp(score - row_max), and rescale its rows.

    (problems, rows, columns) twice, (problems, rows, value_dim) and twice (problems, rows): the
    rows' results so far.
    """
    group, query, key, low, high, scale, first, out_dtype = facts
    count, rows, columns = scores.shape
    threads = -(-columns // (32 * HELD)) * 32
    kernel = arrays.cuda_function(FORWARD, "online_softmax", T=weights.dtype, O=out_dtype, N=HELD)
    sizes = (
        rows,
        columns,
        element_strides(scores)[1],
        sums.shape[2],
        group,
        query,
        key,
        *_bounds(low, high),
    )
    numbers = (*map(np.int32, sizes), sums.dtype.type(scale), np.int32(first))
    return Launch(kernel, (count * rows,), (threads,), numbers)


@Packed
def _normalise(
    sums: Array, _max: Array, _sum: Array, out: Array, lse: Array, *facts: Any
) -> Launch:
    """Write the sums of some rows over their weights, or merge them into the result (out, lse)."""
    group, kv_heads, start, overwrite, dtype = facts
    count, rows, width = sums.shape
    kernel = arrays.cuda_function(FORWARD, "normalise", T=dtype, O=out.dtype, N=HELD)
    steps = map(np.int64, (*element_strides(out), *element_strides(lse)))
    numbers = (*map(np.int32, (rows, width, group, kv_heads, start)), *steps, np.int32(overwrite))
    return Launch(kernel, (count * rows,), (min(THREADS, -(-width // 32) * 32),), numbers)


@Packed
def _dot(dout: Array, out: Array, delta: Array) -> Launch:
    """Set `delta` (batch, heads, seq) to the sum of dout * out over each row."""
    _, seq, heads, dim = out.shape
    rows = delta.size
    kernel = arrays.cuda_function(BACKWARD, "dot", T=out.dtype)
    steps = map(np.int64, (*element_strides(dout), *element_strides(out)))
    numbers = (np.int64(rows), *map(np.int32, (heads, seq, dim)), *steps)
    return Launch(kernel, blocks_of(rows, THREADS // 32), (THREADS,), numbers)


@Packed
def _softmax_backward(
    scores: Array,
    _products: Array,
    weights: Array,
    _slopes: Array,
    lse: Array,
    _delta: Array,
    *facts: Any,
) -> Launch:
    """Turn the scores of a tile and dout v^T into weights and their gradients.

    All are (problems, rows, columns).
    """
    *sizes, low, high, scale = facts
    count, rows, columns = scores.shape
    kernel = arrays.cuda_function(BACKWARD, "softmax_backward", T=weights.dtype)
    whole = map(np.int32, (rows, columns, element_strides(scores)[1], *sizes, *_bounds(low, high)))
    numbers = (*whole, scores.dtype.type(scale), *map(np.int64, element_strides(lse)))
    return Launch(kernel, (count * rows,), (min(THREADS, -(-columns // 32) * 32),), numbers)


def _bounds(low: int | None, high: int | None) -> tuple[int, int]:
    """Return the bounds of a slice as the kernels take them."""
    return -FAR if low is None else low, FAR if high is None else high


# -- How the CuPy kernel cuts attention into problems, and slices into tiles -----------------------


# Size of the scores of one tile of all problems; an H200 has 60 MB of second-level cache.
TILE_BYTES = 32 << 20
KEYS = 1024  # columns of a tile at most
ROWS = 128  # rows of a tile at least, if there are more columns than rows
EDGE = 64  # edges of large tiles are multiples: cuBLAS's fast kernels want rows of 16 bytes


class HeadProblems:
    """How arrays (batch, seq, heads, dim) become problems, one for each entry and key head."""

    def __init__(self, block: KVBlock) -> None:
        self.batch, self.seq, heads, _ = block.q.shape
        self.kv_heads = block.k.shape[2]
        self.group = heads // self.kv_heads  # query heads to a key head
        self.count = self.batch * self.kv_heads  # number of problems

    def rows(self, tile: RowTile) -> slice:
        """Rows of all queries that are those of a tile."""
        start = tile.part.q_start * self.group
        rows = tile.rows(self.group)
        return slice(start + rows.start, start + rows.stop)

    def copied(self, x: Array) -> Array:
        """Return an array as problems: (problems, seq * group, dim) of queries, seq of keys."""
        shape, whole, ours, its = _walk(self.kv_heads, x.shape, x.strides, x.itemsize)
        target = arrays.empty(shape, x.dtype, "cuda")
        strided_copy_views(x, its, target, ours, whole)
        return target

    def tile(self, slices: Sequence[Slice], bytes_per_score: int) -> tuple[int, int]:
        """(rows, columns) of a tile: TILE_BYTES, or ROWS x ROWS of all problems if more."""
        scores = TILE_BYTES // (self.count * bytes_per_score)
        keys = min(KEYS, max([part.k_stop - part.k_start for part in slices]))
        keys = max(1, min(keys, max(scores // ROWS // EDGE * EDGE, ROWS)))
        queries = max(1, max(scores // keys // EDGE * EDGE, ROWS) // self.group)
        queries = min(queries, max([part.q_stop - part.q_start for part in slices]))
        return queries * self.group, keys


@lru_cache(maxsize=4096)
def _walk(
    kv_heads: int, shape: Shape, strides: Shape, itemsize: int
) -> tuple[Shape, Shape, Shape, Shape]:
    """Return the shape as problems of an array (batch, seq, heads, dim), and how to copy it.

    That is (batch, kv_heads, seq, group, dim), with the steps of the problems and of the array.
    """
    batch, seq, heads, dim = shape
    b, s, h, d = [stride // itemsize for stride in strides]
    group = heads // kv_heads
    return (
        (batch * kv_heads, seq * group, dim),
        (batch, kv_heads, seq, group, dim),
        (heads * seq * dim, group * seq * dim, group * dim, dim, 1),
        (b, h * group, s, h, d),
    )
