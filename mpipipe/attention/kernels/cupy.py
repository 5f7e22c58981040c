"""Exact attention on a GPU for any dtype, head dimension and band: cuBLAS products of tiles, and kernels between them.

Each (batch entry, key head) is one problem, and one product does a tile of all problems at once. The query heads that
share a key head are its rows, side by side: row i g + h is query i of head h of the group. So keys and values are never
repeated. A tile of scores stays in the second-level cache between the products. One kernel between the products of the
forward does all the rest of the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018), and one kernel between those of the backward does its part.

In half precision the factors of products are halves, probabilities included, and all sums are float32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.arrays.gemm import batched_gemm
from mpipipe.arrays.strided import strided_copy_views
from mpipipe.attention import accumulate
from mpipipe.attention.kernels import cupy_launch as launch
from mpipipe.attention.kernels.cupy_launch import Factors, Matrices, Place, Rows
from mpipipe.attention.kernels.cupy_problem import Problem, row_tiles
from mpipipe.attention.kernels.interface import AttentionAccumulator, Block, Gradients, Result


def forward(block: Block, result: Result, overwrite: bool) -> None:
    """As `AttentionKernel.forward`; with `overwrite`, `out` may also be of the dtype of `lse`."""
    slices = [part for part in block.slices if result.out.size]
    if not slices:
        return
    q, k, v = block.q, block.k, block.v
    problem = Problem(q, k)
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
                place = Place(part, tile.start, piece.start, problem)
                first = piece is tile.pieces[0]
                launch.online_softmax(tile_scores, factors, state, place, block.scale, first, result.out.dtype)
                batched_gemm(factors, values[:, at], state.sums, add=not first)
            launch.normalise(state, result, problem, part.q_start + tile.start, overwrite, q.dtype)
            block.poll()


def backward(block: Block, dout: Array, result: Result, gradients: Gradients, overwrite: bool = False) -> None:
    """As `AttentionKernel.backward`."""
    q, k, v = block.q, block.k, block.v
    dtype = arrays.accumulator(q.dtype)
    problem = Problem(q, k)
    sums = Gradients(problem.like_rows(q, dtype), problem.like_keys(k, dtype), problem.like_keys(v, dtype))
    for each in sums:
        arrays.set_zero(each)
    slices = [part for part in block.slices if result.out.size]
    if slices:
        factors = Factors(
            problem.rows_of(dout), problem.rows_of(q), problem.keys_of(k), problem.keys_of(v),
            result.lse, launch.dot(dout, result.out, dtype),
        )  # fmt: skip
        _backward_tiles(problem, factors, replace(block, slices=slices), sums)
    for each, target, unfold in zip(sums, gradients, (problem.as_rows, problem.as_keys, problem.as_keys)):
        shape, source_steps, target_steps = unfold(each, target)
        strided_copy_views(each, source_steps, target, target_steps, shape, add=not overwrite)


def make_accumulator(q: Array, v: Array, overwrite: bool) -> AttentionAccumulator:
    """As `AttentionKernel.make_accumulator`."""
    return accumulate.InPlaceAccumulator(forward, q, v, overwrite)


def block_gradients(block: Block, dout: Array, result: Result, dq: Array) -> tuple[Array, Array]:
    """As `AttentionKernel.block_gradients`."""
    return accumulate.block_gradients(backward, block, dout, result, dq)


def _backward_tiles(problem: Problem, factors: Factors, block: Block, sums: Gradients) -> None:
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
                place = Place(part, tile.start, piece.start, problem)
                launch.softmax_backward(matrices, factors, place, block.scale)
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
