"""Launches of the kernels in forward.cu and backward.cu, which stand between the products of attention."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.arrays.strided import THREADS, blocks_of, element_strides
from mpipipe.attention.kernels.cupy_problem import Problem
from mpipipe.attention.kernels.interface import Result
from mpipipe.attention.mask import Slice

FORWARD, BACKWARD = (Path(__file__).with_name(f"{name}.cu") for name in ("forward", "backward"))
HELD = 4  # columns that one thread of the forward holds
FAR = 1 << 30  # a bound that bounds nothing


class Place(NamedTuple):
    """Where a tile of scores lies: its first query and key, counted from the first ones of its slice."""

    part: Slice
    query: int
    key: int
    problem: Problem

    @property
    def bounds(self) -> tuple[np.int32, np.int32]:
        """(low, high) of the slice as the kernels take them."""
        low, high = self.part.low, self.part.high
        return np.int32(-FAR if low is None else low), np.int32(FAR if high is None else high)


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
    scores: Array, weights: Array, state: Rows, place: Place, scale: float, first: bool, out_dtype: np.dtype
) -> None:
    """Turn a tile of scores into weights of exp(score - row_max), and bring `state` to the new maximum of each row."""
    count, rows, columns = scores.shape
    sums, row_max, row_sum = state
    threads = -(-columns // (32 * HELD)) * 32
    kernel = arrays.cuda_function(FORWARD, "online_softmax", T=weights.dtype, O=out_dtype, N=HELD)
    sizes = rows, columns, element_strides(scores)[1], sums.shape[2], place.problem.group, place.query, place.key
    kernel(
        (count * rows,), (threads,),
        (scores, weights, sums, row_max, row_sum, *map(np.int32, sizes), *place.bounds, sums.dtype.type(scale),
         np.int32(first)),
    )  # fmt: skip


def normalise(state: Rows, result: Result, problem: Problem, start: int, overwrite: bool, dtype: np.dtype) -> None:
    """Write the sums of some rows over their weights, or merge them into `result`."""
    (sums, row_max, row_sum), (out, lse) = state, result
    count, rows, width = sums.shape
    kernel = arrays.cuda_function(FORWARD, "normalise", T=dtype, O=out.dtype, N=HELD)
    sizes = rows, width, problem.group, problem.kv_heads, start
    kernel(
        (count * rows,), (min(THREADS, -(-width // 32) * 32),),
        (sums, row_max, row_sum, out, lse, *map(np.int32, sizes),
         *map(np.int64, (*element_strides(out), *element_strides(lse))), np.int32(overwrite)),
    )  # fmt: skip


def dot(dout: Array, out: Array, dtype: np.dtype) -> Array:
    """Return the sum of dout * out over each row, (batch, heads, seq)."""
    batch, seq, heads, dim = out.shape
    delta = arrays.empty((batch, heads, seq), dtype, "cuda")
    rows = delta.size
    kernel = arrays.cuda_function(BACKWARD, "dot", T=out.dtype)
    kernel(
        blocks_of(rows, THREADS // 32), (THREADS,),
        (dout, out, delta, np.int64(rows), *map(np.int32, (heads, seq, dim)),
         *map(np.int64, (*element_strides(dout), *element_strides(out)))),
    )  # fmt: skip
    return delta


def softmax_backward(matrices: Matrices, factors: Factors, place: Place, scale: float) -> None:
    """Turn the scores of a tile, and dout v^T, into the weights and their gradients."""
    scores, (part, query, key, problem) = matrices.scores, place
    count, rows, columns = scores.shape
    row_step = element_strides(scores)[1]
    sizes = rows, columns, row_step, problem.group, problem.kv_heads, problem.seq, part.q_start, query, key
    kernel = arrays.cuda_function(BACKWARD, "softmax_backward", T=matrices.weights.dtype)
    kernel(
        (count * rows,), (min(THREADS, -(-columns // 32) * 32),),
        (*matrices, factors.lse, factors.delta, *map(np.int32, sizes), *place.bounds,
         scores.dtype.type(scale), *map(np.int64, element_strides(factors.lse))),
    )  # fmt: skip
