"""Exact attention on a GPU for any dtype, head dimension and band: cuBLAS products of tiles, and kernels between them.

Each (batch entry, key head) is one problem, and one product does a tile of all problems at once. The query heads that
share a key head are its rows, side by side: row i g + h is query i of head h of the group. So keys and values are never
repeated. A tile of scores stays in the second-level cache between the products. One kernel between the products of the
forward does all the rest of the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018), and one kernel between those of the backward does its part.

In half precision the factors of products are halves, probabilities included, and all sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from mpipipe.attention.kernels.interface import Gradients, InPlaceAccumulator, KVBlock, OutLse, gradients_from_zeros
from mpipipe.attention.mask import Slice


def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`; with `overwrite`, `out` may also be of the dtype of `lse`."""
    slices = [part for part in block.slices if result.out.size]
    if not slices:
        return
    q, k, v = block.q, block.k, block.v
    problem = HeadProblems(q, k)
    queries, keys, values = problem.rows_of(q), problem.keys_of(k), problem.keys_of(v)
    dtype = arrays.accumulator(q.dtype)
    row_count, key_count = problem.tile(slices, dtype.itemsize)
    scores, weights = _tile_pair(problem.count, row_count, key_count, q.dtype)
    sums = arrays.empty((problem.count, row_count, v.shape[3]), dtype, "cuda")
    row_max, row_sum = (arrays.empty((problem.count, row_count), dtype, "cuda") for _ in range(2))
    for part in slices:
        for tile in row_tiles(part, row_count // problem.group, key_count):
            rows = problem.rows(part, tile)
            count = rows.stop - rows.start
            state = Rows(_front(sums, count), row_max, row_sum)
            for piece in tile.pieces:
                at = slice(part.k_start + piece.start, part.k_start + piece.stop)
                columns = piece.stop - piece.start
                tile_scores, factors = _front(scores, count, columns), _front(weights, count, columns)
                batched_gemm(queries[:, rows], keys[:, at], tile_scores, transpose_b=True)
                place = TilePlace(part, tile.start, piece.start, problem)
                first = piece is tile.pieces[0]
                online_softmax(tile_scores, factors, state, place, block.scale, first, result.out.dtype)
                batched_gemm(factors, values[:, at], state.sums, add=not first)
            normalise(state, result, problem, part.q_start + tile.start, overwrite, q.dtype)
            block.poll()


def backward(block: KVBlock, dout: Array, result: OutLse, gradients: Gradients, overwrite: bool = False) -> None:
    """As `AttentionKernel.backward`."""
    q, k, v = block.q, block.k, block.v
    dtype = arrays.accumulator(q.dtype)
    problem = HeadProblems(q, k)
    sums = Gradients(problem.like_rows(q, dtype), problem.like_keys(k, dtype), problem.like_keys(v, dtype))
    for each in sums:
        arrays.set_zero(each)
    slices = [part for part in block.slices if result.out.size]
    if slices:
        factors = Factors(
            problem.rows_of(dout), problem.rows_of(q), problem.keys_of(k), problem.keys_of(v),
            result.lse, dot(dout, result.out, dtype),
        )  # fmt: skip
        _backward_tiles(problem, factors, replace(block, slices=slices), sums)
    for each, target, unfold in zip(sums, gradients, (problem.as_rows, problem.as_keys, problem.as_keys)):
        shape, source_steps, target_steps = unfold(each, target)
        strided_copy_views(each, source_steps, target, target_steps, shape, add=not overwrite)


make_accumulator, block_gradients = partial(InPlaceAccumulator, forward), partial(gradients_from_zeros, backward)


def _backward_tiles(problem: HeadProblems, factors: Factors, block: KVBlock, sums: Gradients) -> None:
    dout, q, k, v, _, _ = factors
    dq, dk, dv = sums
    row_count, key_count = problem.tile(block.slices, 2 * dq.itemsize)
    pairs = [_tile_pair(problem.count, row_count, key_count, q.dtype) for _ in range(2)]
    (scores, weights), (products, slopes) = pairs
    for part in block.slices:
        for tile in row_tiles(part, row_count // problem.group, key_count):
            rows = problem.rows(part, tile)
            for piece in tile.pieces:
                at = slice(part.k_start + piece.start, part.k_start + piece.stop)
                size = rows.stop - rows.start, piece.stop - piece.start
                matrices = Matrices(*(_front(x, *size) for x in (scores, products, weights, slopes)))
                batched_gemm(q[:, rows], k[:, at], matrices.scores, transpose_b=True)
                batched_gemm(dout[:, rows], v[:, at], matrices.products, transpose_b=True)
                place = TilePlace(part, tile.start, piece.start, problem)
                softmax_backward(matrices, factors, place, block.scale)
                batched_gemm(matrices.weights, dout[:, rows], dv[:, at], transpose_a=True, add=True)
                batched_gemm(matrices.slopes, q[:, rows], dk[:, at], transpose_a=True, add=True, factor=block.scale)
                batched_gemm(matrices.slopes, k[:, at], dq[:, rows], add=True, factor=block.scale)
            block.poll()


def _tile_pair(count: int, rows: int, keys: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Memory for a tile in the accumulator dtype and in `dtype`; the same memory if these are equal."""
    shape = count, rows, -(-keys // 8) * 8
    sum_dtype = arrays.accumulator(dtype)
    sums = arrays.empty(shape, sum_dtype, "cuda")
    return sums, sums if sum_dtype == dtype else arrays.empty(shape, dtype, "cuda")


def _front(x: Array, rows: int, columns: int | None = None) -> Array:
    """A smaller matrix at the front of the memory of each tile; rows are apart as before, problems lie close."""
    pitch = x.shape[2]
    flat = x.reshape(-1)[: x.shape[0] * rows * pitch].reshape(x.shape[0], rows, pitch)
    return flat if columns is None else flat[:, :, :columns]


# -- Launches of the kernels in forward.cu and backward.cu, which stand between the products of attention -------------


FORWARD, BACKWARD = (Path(__file__).with_name(f"{name}.cu") for name in ("forward", "backward"))
HELD = 4  # columns that one thread of the forward holds
FAR = 1 << 30  # a bound that bounds nothing


class TilePlace(NamedTuple):
    """Where a tile of scores lies: its first query and key, counted from the first ones of its slice."""

    part: Slice
    query: int
    key: int
    problem: HeadProblems


class Rows(NamedTuple):
    """Result so far of the rows of a tile: (problems, rows, value_dim) and twice (problems, rows)."""

    sums: Array
    row_max: Array
    row_sum: Array


class Matrices(NamedTuple):
    """Matrices of one tile of the backward, (problems, rows, columns)."""

    scores: Array  # q k
    products: Array  # dout v
    weights: Array  # P
    slopes: Array  # dS


class Factors(NamedTuple):
    """What the backward multiplies, laid out in problems, and two numbers for each row."""

    dout: Array
    q: Array
    k: Array
    v: Array
    lse: Array  # as the caller has it
    delta: Array  # sum of dout * out, (batch, heads, seq)


def online_softmax(
    scores: Array, weights: Array, state: Rows, place: TilePlace, scale: float, first: bool, out_dtype: np.dtype
) -> None:
    """Turn a tile of scores into weights of exp(score - row_max), and bring `state` to the new maximum of each row."""
    facts = place.problem.group, place.query, place.key, place.part.low, place.part.high, scale, first, out_dtype
    _softmax((scores, weights, state.sums), (state.row_max, state.row_sum), facts)


def _pack_softmax(scores: Array, weights: Array, sums: Array, _row_max: Array, _row_sum: Array, *facts: Any) -> Launch:
    group, query, key, low, high, scale, first, out_dtype = facts
    count, rows, columns = scores.shape
    threads = -(-columns // (32 * HELD)) * 32
    kernel = arrays.cuda_function(FORWARD, "online_softmax", T=weights.dtype, O=out_dtype, N=HELD)
    sizes = rows, columns, element_strides(scores)[1], sums.shape[2], group, query, key, *_bounds(low, high)
    numbers = (*map(np.int32, sizes), sums.dtype.type(scale), np.int32(first))
    return Launch(kernel, (count * rows,), (threads,), numbers)


def normalise(state: Rows, result: OutLse, problem: HeadProblems, start: int, overwrite: bool, dtype: np.dtype) -> None:
    """Write the sums of some rows over their weights, or merge them into `result`."""
    (sums, row_max, row_sum), (out, lse) = state, result
    facts = problem.group, problem.kv_heads, start, overwrite, dtype
    _normalise((sums, row_max, row_sum, out, lse), (), facts)


def _pack_normalise(sums: Array, _max: Array, _sum: Array, out: Array, lse: Array, *facts: Any) -> Launch:
    group, kv_heads, start, overwrite, dtype = facts
    count, rows, width = sums.shape
    kernel = arrays.cuda_function(FORWARD, "normalise", T=dtype, O=out.dtype, N=HELD)
    steps = map(np.int64, (*element_strides(out), *element_strides(lse)))
    numbers = (*map(np.int32, (rows, width, group, kv_heads, start)), *steps, np.int32(overwrite))
    return Launch(kernel, (count * rows,), (min(THREADS, -(-width // 32) * 32),), numbers)


def dot(dout: Array, out: Array, dtype: np.dtype) -> Array:
    """Return the sum of dout * out over each row, (batch, heads, seq)."""
    batch, seq, heads, _ = out.shape
    delta = arrays.empty((batch, heads, seq), dtype, "cuda")
    _dot((dout, out), (delta,))
    return delta


def _pack_dot(dout: Array, out: Array, delta: Array) -> Launch:
    _, seq, heads, dim = out.shape
    rows = delta.size
    kernel = arrays.cuda_function(BACKWARD, "dot", T=out.dtype)
    steps = map(np.int64, (*element_strides(dout), *element_strides(out)))
    numbers = (np.int64(rows), *map(np.int32, (heads, seq, dim)), *steps)
    return Launch(kernel, blocks_of(rows, THREADS // 32), (THREADS,), numbers)


def softmax_backward(matrices: Matrices, factors: Factors, place: TilePlace, scale: float) -> None:
    """Turn the scores of a tile, and dout v^T, into the weights and their gradients."""
    part, query, key, problem = place
    facts = problem.group, problem.kv_heads, problem.seq, part.q_start, query, key, part.low, part.high, scale
    _softmax_backward((*matrices, factors.lse), (factors.delta,), facts)


def _pack_softmax_backward(
    scores: Array, _products: Array, weights: Array, _slopes: Array, lse: Array, _delta: Array, *facts: Any
) -> Launch:
    *sizes, low, high, scale = facts
    count, rows, columns = scores.shape
    kernel = arrays.cuda_function(BACKWARD, "softmax_backward", T=weights.dtype)
    whole = map(np.int32, (rows, columns, element_strides(scores)[1], *sizes, *_bounds(low, high)))
    numbers = (*whole, scores.dtype.type(scale), *map(np.int64, element_strides(lse)))
    return Launch(kernel, (count * rows,), (min(THREADS, -(-columns // 32) * 32),), numbers)


def _bounds(low: int | None, high: int | None) -> tuple[int, int]:
    """Return the bounds of a slice as the kernels take them."""
    return -FAR if low is None else low, FAR if high is None else high


_softmax, _normalise, _dot = Packed(_pack_softmax), Packed(_pack_normalise), Packed(_pack_dot)
_softmax_backward = Packed(_pack_softmax_backward)


# -- How the CuPy kernel cuts attention into problems, and slices into tiles ------------------------------------------


TILE_BYTES = 32 << 20  # of the scores of one tile of all problems; an H200 has 60 MB of second-level cache
KEYS = 1024  # columns of a tile at most
ROWS = 128  # rows of a tile at least, if there are more columns than rows


class RowTile(NamedTuple):
    """Queries start ... stop - 1 of a slice, and the pieces of keys that they see, counted from its first."""

    start: int
    stop: int
    pieces: list[slice]


def row_tiles(part: Slice, queries: int, keys: int) -> Iterator[RowTile]:
    """Tiles of `queries` rows of a slice, in pieces of `keys` columns."""
    seq, all_keys = part.q_stop - part.q_start, part.k_stop - part.k_start
    for start in range(0, seq, queries):
        stop = min(start + queries, seq)
        first = 0 if part.low is None else max(0, start + part.low)
        end = all_keys if part.high is None else min(all_keys, stop + part.high)
        pieces = [slice(at, min(at + keys, end)) for at in range(first, end, keys)]
        yield RowTile(start, stop, pieces or [slice(0, min(keys, all_keys))])  # rows that see nothing have a result too


class HeadProblems:
    """How (batch, seq, heads, dim) arrays become problems of rows."""

    def __init__(self, q: Array, k: Array) -> None:
        self.batch, self.seq, heads, _ = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.group = heads // self.kv_heads  # query heads to a key head
        self.count = self.batch * self.kv_heads  # number of problems

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
