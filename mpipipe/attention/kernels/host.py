"""Exact attention on the host, in tiles that stay in cache.

Each (batch entry, key head) is one problem. The query heads that share the key head are its rows, side by side: row
i g + h is query i of head h of the group. So keys and values are never repeated.

Two things keep passes over the scores few:

- A row is normalised by an upper bound of its scores instead of their maximum: m_i = |q_i| max_j |k_j|
  (Cauchy-Schwarz; q carries the scale). The bound is one more column of the matrix product, (q_i, -m_i) (k_j, 1). No
  pass looks for the maximum or subtracts it, and nothing is rescaled between tiles. Scores lie in [-m_i, m_i], so the
  exponentials stay above exp(-2 m_i). If that is no normal number, the online maximum is used instead (Milakov and
  Gimelshein, "Online normalizer calculation for softmax", 2018).
- The backward knows the log-sum-exp L_i of each row: exp(s_ij - L_i) <= 1 are the final probabilities P. L_i is one
  more column of the product too, and so is D_i = sum(dout_i * out_i) in dP - D (Dao, "FlashAttention-2", 2023,
  algorithm 2): dS = P * (dP - D), dq = scale dS k, dk = dS^T (scale q), dv = P^T dout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial, wraps
from itertools import product
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from mpipipe.arrays import float32_like, is_half, round_into, upcast
from mpipipe.attention.bias import Bias, evaluated
from mpipipe.attention.kernels.interface import Gradients, InPlaceAccumulator, KVBlock, OutLse, gradients_from_zeros
from mpipipe.attention.mask import Slice
from mpipipe.attention.merge import merge
from mpipipe.processor import each, on_this_thread

Function = TypeVar("Function", bound=Callable[..., None])


def upcast_forward(forward: Function) -> Function:
    """Let a kernel's `forward` for host arrays take half precision: it upcasts once and rounds once."""

    @wraps(forward)
    def wide(block: KVBlock, result: OutLse, overwrite: bool) -> None:
        if not is_half(block.q.dtype):
            return forward(block, result, overwrite)
        out = float32_like(result.out)
        forward(_wide_block(block), result._replace(out=out), overwrite)
        round_into(result.out, out)

    return cast(Function, wide)


def upcast_backward(backward: Callable[[KVBlock, np.ndarray, OutLse, Gradients], None]) -> Callable[..., None]:
    """Make a kernel's `backward` for host arrays, half precision included, of one that adds to gradients."""

    @wraps(backward)
    def wide(block: KVBlock, dout: np.ndarray, result: OutLse, gradients: Gradients, overwrite: bool = False) -> None:
        half = is_half(block.q.dtype)
        sums = Gradients(*map(float32_like, gradients)) if half else gradients
        if overwrite:
            for each in sums:
                each.fill(0)
        if not half:
            return backward(block, dout, result, gradients)
        backward(_wide_block(block), upcast(dout), result._replace(out=upcast(result.out)), sums)
        for values, target in zip(sums, gradients):
            round_into(target, values)

    return wide


def _wide_block(block: KVBlock) -> KVBlock:
    return replace(block, q=upcast(block.q), k=upcast(block.k), v=upcast(block.v))


ROWS = 128  # of one tile of scores
KEYS = 512  # columns of one tile: a tile is 256 KiB of float32
# Twice the bound may reach this: exp(-these), times values down to 1e-20, are still normal numbers.
_SAFE = {np.dtype(np.float32): 40.0, np.dtype(np.float64): 600.0}


class _Part(NamedTuple):
    """A slice, with what is added to its scores."""

    slice: Slice
    bias: Callable[[np.ndarray, int], None] | None = None


# called with (part, batch entry, key head, its query heads, rows, keys), which are one problem
Problem: TypeAlias = Callable[[_Part, int, int, slice, slice, slice], object]


def _each_problem(block: KVBlock, solve: Problem) -> None:
    """Solve all problems: those of one key head in their order, since they add to the same sums.

    The threads of the rank share the key heads. A bias is a function of the user's, which the calling thread alone
    calls.
    """
    (batch, _, heads, _), kv_heads = block.q.shape, block.k.shape[2]
    group = heads // kv_heads
    owners = [(b, h, slice(h * group, (h + 1) * group)) for b, h in product(range(batch), range(kv_heads))]
    if block.bias is None:

        def work(owner: tuple[int, int, slice]) -> None:
            for part in block.slices:
                solve(_Part(part), *owner, slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop))

        each(work, owners, block.poll)
        return
    for part in (short for whole in block.slices for short in _one_tile_each(whole, group)):
        bias = _SliceBias(block.bias, part, heads, block.q.dtype)  # the same for all of a batch
        for b, h, own in owners:
            biased = _Part(part, partial(bias.add, own))
            solve(biased, b, h, own, slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop))


@upcast_forward
def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`."""
    (q, k, v), (out, lse) = (block.q, block.k, block.v), result
    poll = on_this_thread(block.poll)

    def solve(part: _Part, b: int, h: int, own: slice, rows: slice, keys: slice) -> None:
        arrays = q[b, rows, own], k[b, keys, h], v[b, keys, h]
        head_out, head_lse = _forward_head(*arrays, block.scale, part, poll)
        if overwrite:
            out[b, rows, own], lse[b, own, rows] = head_out, head_lse.T
        else:
            merge(out[b, rows, own], lse[b, own, rows].T, head_out, head_lse)

    _each_problem(block, solve)


@upcast_backward
def backward(block: KVBlock, dout: np.ndarray, result: OutLse, gradients: Gradients) -> None:
    """As `AttentionKernel.backward`."""
    (q, k, v), (out, lse), (dq, dk, dv) = (block.q, block.k, block.v), result, gradients
    poll = on_this_thread(block.poll)

    def solve(part: _Part, b: int, h: int, own: slice, rows: slice, keys: slice) -> None:
        delta, row_lse = np.vecdot(dout[b, rows, own], out[b, rows, own]), lse[b, own, rows]
        hidden = np.where(np.isneginf(row_lse), row_lse, -row_lse)  # a row that sees nothing has probabilities of 0
        factors = (
            _with_column(q[b, rows, own], block.scale, hidden.T),
            _with_column(dout[b, rows, own], 1, -delta),
            _with_column(k[b, keys, h, None], 1, 1),
            _with_column(v[b, keys, h, None], 1, 1),
        )
        head = Gradients(dq[b, rows, own], dk[b, keys, h], dv[b, keys, h])
        _backward_head(factors, part, block.scale, head, poll)

    _each_problem(block, solve)


make_accumulator, block_gradients = partial(InPlaceAccumulator, forward), partial(gradients_from_zeros, backward)


# queries, gradients of the output, keys and values of one key head, as rows with one more column
Factors: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Keys: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def _forward_head(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, part: _Part, poll: Callable[[], object]
) -> tuple[np.ndarray, np.ndarray]:
    """One key head and slice: q (seq, group, dim), k and v (keys, dim).

    Returns out (seq, group, value_dim) and lse (seq, group).
    """
    seq, group, dim = q.shape
    width = v.shape[1]
    queries = _with_column(q, scale, 0)
    row_max = np.sqrt(np.vecdot(queries[:, :dim], queries[:, :dim]))[:, None]
    np.multiply(row_max, np.sqrt(np.vecdot(k, k).max()), out=row_max)  # a bound of the maximum
    np.negative(row_max, out=queries[:, dim:])
    acc, row_sum = np.empty((seq * group, width), q.dtype), np.empty((seq * group, 1), q.dtype)
    keys = _with_column(k[:, None], 1, 1), np.ascontiguousarray(v), np.ones((KEYS, 1), k.dtype)
    attend = _bounded if part.bias is None and 2 * row_max.max() < _SAFE[q.dtype] else _online

    def work(tile: _Tile) -> None:
        at = tile.rows
        attend((queries[at], acc[at], row_sum[at], row_max[at]), keys, tile)
        poll()

    if part.bias is None:
        each(work, list(_tiles(part, group, q.dtype)), poll)  # shared where there is but one key head
    else:
        for tile in _tiles(part, group, q.dtype):
            work(tile)
    if part.bias is not None:
        row_sum[row_sum == 0] = 1  # all keys of a row had a bias of -inf
    np.divide(acc, row_sum, out=acc)
    np.log(row_sum, out=row_sum)
    np.add(row_sum, row_max, out=row_sum)
    return acc.reshape(seq, group, width), row_sum.reshape(seq, group)


def _backward_head(
    factors: Factors, part: _Part, scale: float, gradients: Gradients, poll: Callable[[], object]
) -> None:
    """One key head and slice: dq (seq, group, dim), dk (keys, dim), dv (keys, value_dim)."""
    (queries, slopes, keys, values), (dq, dk, dv) = factors, gradients
    seq, group, dim = dq.shape
    dqueries = np.empty((seq * group, dim), dq.dtype)
    dkeys, dvalues = np.zeros((len(dk), dim), dq.dtype), np.zeros((len(dv), dv.shape[1]), dq.dtype)
    for tile in _tiles(part, group, dq.dtype):
        at = tile.rows
        _backward_tile((queries[at], slopes[at], keys, values), tile, Gradients(dqueries[at], dkeys, dvalues))
        poll()
    np.multiply(dqueries, scale, out=dqueries)
    np.add(dq, dqueries.reshape(dq.shape), out=dq)
    np.add(dk, dkeys, out=dk)
    np.add(dv, dvalues, out=dv)


def _with_column(x: np.ndarray, scale: float, value: np.ndarray | float) -> np.ndarray:
    """X (seq, group, dim) times `scale` as rows (seq * group, dim + 1) whose last column is `value`."""
    seq, group, dim = x.shape
    rows = np.empty((seq, group, dim + 1), x.dtype)
    np.multiply(x, scale, out=rows[..., :dim])
    rows[..., dim] = value
    return rows.reshape(seq * group, dim + 1)


@lru_cache(maxsize=64)
def _corner(group: int, dtype: np.dtype, upper: bool) -> np.ndarray:
    """A square: 0 if row r of a tile sees column c, else -inf. It does if c <= r with `upper`, if c >= r without."""
    step = max(1, ROWS // group)
    seen = np.tri(step, dtype=bool)
    square = np.where(seen if upper else seen.T, dtype.type(0), dtype.type(-np.inf)).repeat(group, axis=0)
    square.flags.writeable = False
    return square


class _SliceBias:
    """The bias of a slice of one tile of rows, evaluated once for each piece of keys, for all heads."""

    def __init__(self, bias: Bias, part: Slice, heads: int, dtype: np.dtype) -> None:
        self._bias, self._heads, self._dtype = bias, heads, dtype
        self._queries, self._keys = bias.queries[part.q_start : part.q_stop, None], bias.keys[part.k_start :]
        self._pieces: dict[int, np.ndarray] = {}

    def add(self, own: slice, scores: np.ndarray, first: int) -> None:
        """Add to the scores (rows, keys from `first` on) of some heads."""
        if first not in self._pieces:
            keys = self._keys[first : first + scores.shape[1]]
            self._pieces[first] = evaluated(self._bias.function, self._heads, self._queries, keys, self._dtype)
        numbers = self._pieces[first][own].swapaxes(0, 1)
        rows = scores.reshape(numbers.shape)
        np.add(rows, numbers, out=rows)


def _one_tile_each(part: Slice, group: int) -> Iterator[Slice]:
    """Cut a slice into slices of one tile of rows, with no more keys than they see."""
    rows, keys, step = part.q_stop - part.q_start, part.k_stop - part.k_start, max(1, ROWS // group)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first = 0 if part.low is None else max(0, start + part.low)
        end = keys if part.high is None else min(keys, stop + part.high)
        bounds = (None if bound is None else bound + start - first for bound in (part.low, part.high))
        yield Slice(part.q_start + start, part.q_start + stop, part.k_start + first, part.k_start + end, *bounds)


class _Tile:
    """Queries start ... stop - 1 of a slice, which see keys first ... end - 1 at most.

    rows : their rows, `group` for each query
    """

    __slots__ = ("bias", "corners", "end", "first", "rows")

    def __init__(self, whole: _Part, group: int, start: int, stop: int, dtype: np.dtype) -> None:
        part, self.bias = whole
        self.rows = slice(start * group, stop * group)
        keys = part.k_stop - part.k_start
        self.first = 0 if part.low is None else max(0, start + part.low)
        self.end = keys if part.high is None else min(keys, stop + part.high)
        bounds = ((part.high, True), (part.low, False))
        self.corners = [(start + bound, _corner(group, dtype, upper)) for bound, upper in bounds if bound is not None]

    def pieces(self) -> Iterator[slice]:
        """The keys, in pieces whose scores stay in cache."""
        for start in range(self.first, self.end, KEYS):
            yield slice(start, min(start + KEYS, self.end))

    def add_to(self, scores: np.ndarray, first: int) -> None:
        """Add the bias to the scores (rows, keys from `first` on), and -inf to those of hidden keys.

        This comes before the exponential: the score of a hidden key may be anything, and its exponential overflow.
        """
        if self.bias is not None:
            self.bias(scores, first)
        end = first + scores.shape[1]
        for column, corner in self.corners:
            low, high = max(first, column), min(end, column + corner.shape[1])
            if low < high:
                part = scores[:, low - first : high - first]
                np.add(part, corner[: len(part), low - column : high - column], out=part)


def _tiles(part: _Part, group: int, dtype: np.dtype) -> Iterator[_Tile]:
    seq = part.slice.q_stop - part.slice.q_start
    step = max(1, ROWS // group)
    for start in range(0, seq, step):
        yield _Tile(part, group, start, min(start + step, seq), dtype)


def _bounded(rows: Factors, block: Keys, tile: _Tile) -> None:
    """Set the sums of rows, relative to the bound in the last column of the queries.

    rows : scaled queries, their output before it is normalised, the sums of the exponentials, and the bound
    block : keys, whose last column is 1, their values, and a column of ones
    """
    (queries, acc, row_sum, _), (keys, values, ones) = rows, block
    for at in tile.pieces():
        scores = np.matmul(queries, keys[at].T)
        tile.add_to(scores, at.start)
        np.exp(scores, out=scores)
        if at.start == tile.first:
            np.matmul(scores, values[at], out=acc)
            np.matmul(scores, ones[: scores.shape[1]], out=row_sum)
        else:
            np.add(acc, np.matmul(scores, values[at]), out=acc)
            np.add(row_sum, np.matmul(scores, ones[: scores.shape[1]]), out=row_sum)


def _online(rows: Factors, block: Keys, tile: _Tile) -> None:
    """As `_bounded`, relative to the running maximum, which ends up in `row_max`: right for scores of any size."""
    (queries, acc, row_sum, row_max), (keys, values, ones) = rows, block
    acc[...], row_sum[...], row_max[...] = 0, 0, -np.inf
    for at in tile.pieces():
        scores = np.matmul(queries[:, :-1], keys[at, :-1].T)
        tile.add_to(scores, at.start)
        high = np.maximum(row_max, scores.max(1, keepdims=True))
        safe_max = np.where(np.isneginf(high), 0, high)  # a row may have seen no key up to here
        np.subtract(scores, safe_max, out=scores)
        np.exp(scores, out=scores)
        rescale = np.exp(row_max - safe_max)
        np.multiply(acc, rescale, out=acc)
        np.multiply(row_sum, rescale, out=row_sum)
        np.add(acc, np.matmul(scores, values[at]), out=acc)
        np.add(row_sum, np.matmul(scores, ones[: scores.shape[1]]), out=row_sum)
        row_max[...] = high


def _backward_tile(factors: Factors, tile: _Tile, sums: Gradients) -> None:
    """Set dq to dS k, and add to dk and dv."""
    (queries, gradients, keys, values), (dqueries, dkeys, dvalues) = factors, sums
    dim, width = dqueries.shape[1], dvalues.shape[1]
    for at in tile.pieces():
        weights = np.matmul(queries, keys[at].T)
        tile.add_to(weights, at.start)
        np.exp(weights, out=weights)
        slopes = np.matmul(gradients, values[at].T)
        np.multiply(slopes, weights, out=slopes)
        dvalues[at] += np.matmul(weights.T, gradients[:, :width])
        dkeys[at] += np.matmul(slopes.T, queries[:, :dim])
        if at.start == tile.first:
            np.matmul(slopes, keys[at, :dim], out=dqueries)
        else:
            np.add(dqueries, np.matmul(slopes, keys[at, :dim]), out=dqueries)
