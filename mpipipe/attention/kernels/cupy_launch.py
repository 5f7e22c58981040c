"""Launches of the kernels in forward.cu and backward.cu, which stand between the products of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.arrays.launch import Call
from mpipipe.arrays.packed import Packed
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
    facts = place.problem.group, place.query, place.key, place.part.low, place.part.high, scale, first, out_dtype
    _softmax((scores, weights, state.sums), (state.row_max, state.row_sum), facts)


def _pack_softmax(scores: Array, weights: Array, sums: Array, _row_max: Array, _row_sum: Array, *facts: Any) -> Call:
    group, query, key, low, high, scale, first, out_dtype = facts
    count, rows, columns = scores.shape
    threads = -(-columns // (32 * HELD)) * 32
    kernel = arrays.cuda_function(FORWARD, "online_softmax", T=weights.dtype, O=out_dtype, N=HELD)
    sizes = rows, columns, element_strides(scores)[1], sums.shape[2], group, query, key, *_bounds(low, high)
    numbers = (*map(np.int32, sizes), sums.dtype.type(scale), np.int32(first))
    return Call(kernel, (count * rows,), (threads,), numbers)


def normalise(state: Rows, result: Result, problem: Problem, start: int, overwrite: bool, dtype: np.dtype) -> None:
    """Write the sums of some rows over their weights, or merge them into `result`."""
    (sums, row_max, row_sum), (out, lse) = state, result
    facts = problem.group, problem.kv_heads, start, overwrite, dtype
    _normalise((sums, row_max, row_sum, out, lse), (), facts)


def _pack_normalise(sums: Array, _max: Array, _sum: Array, out: Array, lse: Array, *facts: Any) -> Call:
    group, kv_heads, start, overwrite, dtype = facts
    count, rows, width = sums.shape
    kernel = arrays.cuda_function(FORWARD, "normalise", T=dtype, O=out.dtype, N=HELD)
    steps = map(np.int64, (*element_strides(out), *element_strides(lse)))
    numbers = (*map(np.int32, (rows, width, group, kv_heads, start)), *steps, np.int32(overwrite))
    return Call(kernel, (count * rows,), (min(THREADS, -(-width // 32) * 32),), numbers)


def dot(dout: Array, out: Array, dtype: np.dtype) -> Array:
    """Return the sum of dout * out over each row, (batch, heads, seq)."""
    batch, seq, heads, _ = out.shape
    delta = arrays.empty((batch, heads, seq), dtype, "cuda")
    _dot((dout, out), (delta,))
    return delta


def _pack_dot(dout: Array, out: Array, delta: Array) -> Call:
    _, seq, heads, dim = out.shape
    rows = delta.size
    kernel = arrays.cuda_function(BACKWARD, "dot", T=out.dtype)
    steps = map(np.int64, (*element_strides(dout), *element_strides(out)))
    numbers = (np.int64(rows), *map(np.int32, (heads, seq, dim)), *steps)
    return Call(kernel, blocks_of(rows, THREADS // 32), (THREADS,), numbers)


def softmax_backward(matrices: Matrices, factors: Factors, place: Place, scale: float) -> None:
    """Turn the scores of a tile, and dout v^T, into the weights and their gradients."""
    part, query, key, problem = place
    facts = problem.group, problem.kv_heads, problem.seq, part.q_start, query, key, part.low, part.high, scale
    _softmax_backward((*matrices, factors.lse), (factors.delta,), facts)


def _pack_softmax_backward(
    scores: Array, _products: Array, weights: Array, _slopes: Array, lse: Array, _delta: Array, *facts: Any
) -> Call:
    *sizes, low, high, scale = facts
    count, rows, columns = scores.shape
    kernel = arrays.cuda_function(BACKWARD, "softmax_backward", T=weights.dtype)
    whole = map(np.int32, (rows, columns, element_strides(scores)[1], *sizes, *_bounds(low, high)))
    numbers = (*whole, scores.dtype.type(scale), *map(np.int64, element_strides(lse)))
    return Call(kernel, (count * rows,), (min(THREADS, -(-columns // 32) * 32),), numbers)


def _bounds(low: int | None, high: int | None) -> tuple[int, int]:
    """Return the bounds of a slice as the kernels take them."""
    return -FAR if low is None else low, FAR if high is None else high


_softmax, _normalise, _dot = Packed(_pack_softmax), Packed(_pack_normalise), Packed(_pack_dot)
_softmax_backward = Packed(_pack_softmax_backward)
