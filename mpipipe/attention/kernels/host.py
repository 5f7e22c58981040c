"""Exact attention on the host, in tiles that stay in cache.

Each (batch entry, key head) is one problem. The query heads that share the key head are its rows,
side by side: row i g + h is query i of head h of the group. So keys and values are never repeated.
Small problems are solved several at once, and the threads of the rank share what is left.

Two things keep passes over the scores few:

- A row is normalised by an upper bound of its scores instead of their maximum: m_i = |q_i| max_j
  |k_j| (Cauchy-Schwarz; q carries the scale). The bound is one more column of the matrix product,
  (q_i, -m_i) (k_j, 1). No pass looks for the maximum or subtracts it, and nothing is rescaled
  between tiles. Scores lie in [-m_i, m_i], so the exponentials stay above exp(-2 m_i). If that is
  no normal number, the online maximum is used instead (Milakov and Gimelshein, "Online normalizer
  calculation for softmax", 2018).
- The backward knows the log-sum-exp L_i of each row: exp(s_ij - L_i) <= 1 are the final
  probabilities P. L_i is one more column of the product too, and so is D_i = sum(dout_i * out_i) in
  dP - D (Dao, "FlashAttention-2", 2023, algorithm 2): dS = P * (dP - D), dq = scale dS k, dk = dS^T
  (scale q), dv = P^T dout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from threading import get_ident
from typing import NamedTuple, TypeAlias

import numpy as np

from mpipipe.arrays import float32_like, is_half, round_into, upcast
from mpipipe.attention.kernels.interface import Gradients, KVBlock, OutLse, RowTile, row_tiles
from mpipipe.attention.mask import Slice, in_one_band
from mpipipe.attention.merge import merge
from mpipipe.processor import each


def on_this_thread(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls `function` on this thread, and does nothing on others."""
    here = get_ident()

    def call() -> None:
        if get_ident() == here:
            function()

    return call


def _wide_block(block: KVBlock) -> KVBlock:
    return replace(block, q=upcast(block.q), k=upcast(block.k), v=upcast(block.v))


ROWS = 128  # rows of one tile of scores
KEYS = 512  # columns of one tile: a tile is 256 KiB of float32
# Scores of small problems that are solved at once: fewer and longer calls of numpy.
AT_ONCE = 1 << 18
LEAST = 4  # parts for threads, where there are so many problems
SHARED = 1 << 16  # scores of a part at least: less is no work for another thread
# Twice the bound may reach this: exp(-these), times values down to 1e-20, are still normal numbers.
_SAFE = {np.dtype(np.float32): 40.0, np.dtype(np.float64): 600.0}


class _Problems(NamedTuple):
    """The same slice of some batch entries and key heads."""

    part: Slice
    entries: slice
    heads: slice  # heads of keys
    group: int

    def queries(self, x: np.ndarray) -> np.ndarray:
        """X (batch, seq, heads, ...) as (entries, key heads, rows, group, ...); a view."""
        own = slice(self.heads.start * self.group, self.heads.stop * self.group)
        part = x[self.entries, self.part.q_start : self.part.q_stop, own]
        return part.reshape(*part.shape[:2], -1, self.group, *part.shape[3:]).swapaxes(1, 2)

    def keys(self, x: np.ndarray) -> np.ndarray:
        """X (batch, keys, key heads, dim) as (entries, key heads, keys, 1, dim); a view."""
        return x[self.entries, self.part.k_start : self.part.k_stop, self.heads].swapaxes(1, 2)[
            :, :, :, None
        ]


def _each_problem(block: KVBlock, solve: Callable[[_Problems], object]) -> None:
    """Solve all problems: those of one key head in their order, since they add to the same sums.

    Small ones are solved several at once.
    """
    batch, _, kv_heads, _ = block.k.shape
    group = block.q.shape[2] // kv_heads
    slices = in_one_band(block.slices)
    scores = 1
    for part in slices:
        size = (part.q_stop - part.q_start) * (part.k_stop - part.k_start)
        scores = max(scores, group * size)
    at_once = min(AT_ONCE // scores, max(batch * kv_heads // LEAST, SHARED // scores))

    def work(owners: tuple[slice, slice]) -> None:
        for part in slices:
            solve(_Problems(part, *owners, group))

    entries = _cut(batch, at_once // kv_heads)
    each(work, list(product(entries, _cut(kv_heads, at_once))), block.poll)


def _cut(count: int, most: int) -> list[slice]:
    """Cut `count` into parts of at most `most`, but of at least one."""
    step = max(1, most)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`; halves are upcast once, and rounded once."""
    if is_half(block.q.dtype):
        out = float32_like(result.out)
        forward(_wide_block(block), result._replace(out=out), overwrite)
        round_into(result.out, out)
        return
    poll = on_this_thread(block.poll)
    by_rows = result.lse.swapaxes(1, 2)

    def solve(problems: _Problems) -> None:
        inputs = problems.queries(block.q), problems.keys(block.k), problems.keys(block.v)
        some_out, some_lse = _forward_heads(*inputs, block.scale, problems.part, poll)
        out = problems.queries(result.out)
        lse = problems.queries(by_rows)
        if overwrite:
            out[...], lse[...] = some_out, some_lse
        else:
            merge(out, lse, some_out, some_lse)

    _each_problem(block, solve)


def backward(
    block: KVBlock, dout: np.ndarray, result: OutLse, gradients: Gradients, overwrite: bool = False
) -> None:
    """As `AttentionKernel.backward`."""
    if is_half(block.q.dtype):
        sums = Gradients(*map(float32_like, gradients))
        wide = result._replace(out=upcast(result.out))
        backward(_wide_block(block), upcast(dout), wide, sums, overwrite)
        for values, target in zip(sums, gradients):
            round_into(target, values)
        return
    if overwrite:
        for total in gradients:
            total.fill(0)
    poll = on_this_thread(block.poll)
    by_rows = result.lse.swapaxes(1, 2)

    def solve(problems: _Problems) -> None:
        slopes = problems.queries(dout)
        lse = problems.queries(by_rows)
        delta = np.vecdot(slopes, problems.queries(result.out))
        # A row that sees nothing has probabilities of 0.
        hidden = np.where(np.isneginf(lse), lse, -lse)
        factors = (
            _with_column(problems.queries(block.q), block.scale, hidden),
            _with_column(slopes, 1, -delta),
            _with_column(problems.keys(block.k), 1, 1),
            _with_column(problems.keys(block.v), 1, 1),
        )
        dq, dk, dv = gradients
        sums = Gradients(problems.queries(dq), problems.keys(dk), problems.keys(dv))
        _backward_heads(factors, problems.part, block.scale, sums, poll)

    _each_problem(block, solve)


# queries, gradients of the output, keys and values of some problems, as rows with one more column
Factors: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Keys: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def _forward_heads(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    part: Slice,
    poll: Callable[[], object],
) -> tuple[np.ndarray, np.ndarray]:
    """Compute some problems of one slice.

    q is (entries, key heads, seq, group, dim), k and v (entries, key heads, keys, 1, dim).

    Returns out (entries, key heads, seq, group, value_dim) and lse (entries, key heads, seq,
    group).
    """
    group, dim, width = *q.shape[3:], v.shape[4]
    queries = _with_column(q, scale, 0)
    count, rows, _ = queries.shape
    row_max = np.sqrt(np.vecdot(queries[..., :dim], queries[..., :dim]))[..., None]
    # a bound of the maximum
    np.multiply(row_max, np.sqrt(np.vecdot(k, k).max((2, 3))).reshape(count, 1, 1), out=row_max)
    np.negative(row_max, out=queries[..., dim:])
    acc = np.empty((count, rows, width), q.dtype)
    row_sum = np.empty((count, rows, 1), q.dtype)
    values = np.ascontiguousarray(v).reshape(count, -1, width)
    keys = _with_column(k, 1, 1), values, np.ones((KEYS, 1), k.dtype)
    online = not 2 * row_max.max() < _SAFE[q.dtype]

    def work(tile: RowTile) -> None:
        at = tile.rows(group)
        state = queries[:, at], acc[:, at], row_sum[:, at], row_max[:, at]
        _forward_tile(state, keys, tile, group, online)
        poll()

    # The threads share them where these are all the problems.
    each(work, row_tiles(part, max(1, ROWS // group), KEYS), poll)
    np.divide(acc, row_sum, out=acc)
    np.log(row_sum, out=row_sum)
    np.add(row_sum, row_max, out=row_sum)
    return acc.reshape(*q.shape[:4], width), row_sum.reshape(q.shape[:4])


def _backward_heads(
    factors: Factors, part: Slice, scale: float, gradients: Gradients, poll: Callable[[], object]
) -> None:
    """Compute the gradients of some problems of one slice, shaped as in `_forward_heads`."""
    (queries, slopes, keys, values), (dq, dk, dv) = factors, gradients
    count = len(queries)
    group = dq.shape[3]
    dqueries = np.empty_like(queries[..., :-1], order="C")
    sums = []
    for x, of_rows in ((dk, keys), (dv, values)):
        if x.flags.c_contiguous:
            sums.append(x.reshape(count, -1, x.shape[4]))
        else:
            sums.append(np.zeros_like(of_rows[..., :-1], order="C"))
    dkeys, dvalues = sums
    for tile in row_tiles(part, max(1, ROWS // group), KEYS):
        rows = tile.rows(group)
        tile_queries = queries[:, rows]
        tile_slopes = slopes[:, rows]
        tile_dqueries = dqueries[:, rows]
        for at in tile.pieces:
            weights = np.matmul(tile_queries, keys[:, at].swapaxes(1, 2))
            _hide(weights, tile, at, group)
            np.exp(weights, out=weights)
            dscores = np.matmul(tile_slopes, values[:, at].swapaxes(1, 2))
            np.multiply(dscores, weights, out=dscores)
            dvalues[:, at] += np.matmul(weights.swapaxes(1, 2), tile_slopes[..., :-1])
            dkeys[:, at] += np.matmul(dscores.swapaxes(1, 2), tile_queries[..., :-1])
            if at is tile.pieces[0]:
                np.matmul(dscores, keys[:, at, :-1], out=tile_dqueries)
            else:
                tile_dqueries += np.matmul(dscores, keys[:, at, :-1])
        poll()
    np.multiply(dqueries, scale, out=dqueries)
    np.add(dq, dqueries.reshape(dq.shape), out=dq)
    for x, added in zip((dk, dv), sums):
        if not x.flags.c_contiguous:
            np.add(x, added.reshape(x.shape), out=x)


def _with_column(x: np.ndarray, scale: float, value: np.ndarray | float) -> np.ndarray:
    """Return `scale` x as (problems, rows, dim + 1), with `value` in the last column.

    x is (entries, key heads, seq, group, dim).
    """
    rows = np.empty((*x.shape[:4], x.shape[4] + 1), x.dtype)
    np.multiply(x, scale, out=rows[..., :-1])
    rows[..., -1] = value
    return rows.reshape(x.shape[0] * x.shape[1], -1, rows.shape[4])


@lru_cache(maxsize=64)
def _corner(group: int, dtype: np.dtype, upper: bool) -> np.ndarray:
    """Return a square: 0 if row r sees column c, else -inf.

    Row r sees column c if c <= r with `upper`, if c >= r without.
    """
    step = max(1, ROWS // group)
    seen = np.tri(step, dtype=bool)
    square = np.where(seen if upper else seen.T, dtype.type(0), dtype.type(-np.inf)).repeat(
        group, axis=0
    )
    square.flags.writeable = False
    return square


def _hide(scores: np.ndarray, tile: RowTile, keys: slice, group: int) -> None:
    """Add -inf to the scores (rows, keys) of hidden keys.

    This comes before the exponential: the score of a hidden key may be anything, and its
    exponential overflow.
    """
    for bound, upper in ((tile.part.high, True), (tile.part.low, False)):
        if bound is None:
            continue
        corner = _corner(group, scores.dtype, upper)
        column = tile.start + bound
        low = max(keys.start, column)
        high = min(keys.stop, column + corner.shape[1])
        if low < high:
            seen = scores[..., low - keys.start : high - keys.start]
            np.add(seen, corner[: seen.shape[1], low - column : high - column], out=seen)


def _forward_tile(rows: Factors, block: Keys, tile: RowTile, group: int, online: bool) -> None:
    """Set the sums of rows, relative to the bound in the last column of the queries.

    rows : scaled queries, their output before it is normalised, the sums of the exponentials, and
        the bound
    block : keys, whose last column is 1, their values, and a column of ones
    online : relative to the running maximum, which becomes the bound: right for scores of any size
    """
    (queries, acc, row_sum, row_max), (keys, values, ones) = rows, block
    if online:
        queries = queries[..., :-1]
        keys = keys[..., :-1]
        acc[...] = 0
        row_sum[...] = 0
        row_max[...] = -np.inf
    for at in tile.pieces:
        scores = np.matmul(queries, keys[:, at].swapaxes(1, 2))
        _hide(scores, tile, at, group)
        if online:
            high = np.maximum(row_max, scores.max(2, keepdims=True))
            safe_max = np.where(np.isneginf(high), 0, high)  # a row may have seen no key up to here
            np.subtract(scores, safe_max, out=scores)
            rescale = np.exp(row_max - safe_max)
            np.multiply(acc, rescale, out=acc)
            np.multiply(row_sum, rescale, out=row_sum)
            row_max[...] = high
        np.exp(scores, out=scores)
        if at is tile.pieces[0]:
            np.matmul(scores, values[:, at], out=acc)
            np.matmul(scores, ones[: scores.shape[2]], out=row_sum)
        else:
            np.add(acc, np.matmul(scores, values[:, at]), out=acc)
            np.add(row_sum, np.matmul(scores, ones[: scores.shape[2]]), out=row_sum)
