"""Exact attention on the host, in tiles that stay in cache.

Each (batch entry, key head) is one problem. The query heads that share the key head are rows of it, side by side (row
i g + h is query i of head h of the group), so keys and values are never repeated.

Two things keep passes over the scores few:

- A row is normalised by an upper bound of its scores instead of their maximum: m_i = |q_i| max_j |k_j|
  (Cauchy-Schwarz; q carries the scale). The bound rides in the matrix product as one more column (q_i, -m_i) (k_j, 1),
  so there is no pass for the maximum, none to subtract it, and no rescaling between tiles. Scores lie in [-m_i, m_i],
  so the exponentials stay above exp(-2 m_i), which must be a normal number: otherwise the online maximum is used
  (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
- The backward knows the log-sum-exp L_i of each row, and exp(s_ij - L_i) <= 1 are the final probabilities P. L_i rides
  in the product in the same way, and so does D_i = sum(dout_i * out_i) in dP - D (Dao, "FlashAttention-2", 2023,
  algorithm 2): dS = P * (dP - D), dq = scale dS k, dk = dS^T (scale q), dv = P^T dout.

Both work on one block of keys, in the slices that `blocks.plan` found, and add to what other blocks gave: the same
functions serve attention on one rank and in a ring.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpipipe.attention.kernels.half_precision import upcast_halves
from mpipipe.attention.merge import merge

ROWS = 128  # of one tile of scores
KEYS = 512  # columns of one tile: a tile is 256 KiB of float32
# Twice the bound may reach this: exp(-these), times values down to 1e-20, are still normal numbers.
_SAFE = {np.dtype(np.float32): 40.0, np.dtype(np.float64): 600.0}


def nothing() -> None:
    """The poll that does nothing."""


@upcast_halves
def forward(q, k, v, scale, slices, out, lse, fresh, poll=nothing):
    """Attend to one block of keys.

    Parameters
    ----------
    q : (batch, seq, heads, dim); k, v : (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim); any strides
    slices : blocks.Slice, the parts of the block that are seen
    out : (batch, seq, heads, value_dim), and lse : (batch, heads, seq), log-sum-exp of the scores: the result over the
        blocks so far, to which this one is merged; (0, -inf) where there is none
    fresh : whether each row is in exactly one slice and no block came before, so that results are set: out and lse hold
        nothing yet, and out may be of the dtype of q
    poll : called after each tile

    All arrays are of one dtype, but out and lse are of its accumulator dtype: float32 for half precision.
    """
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    for b in range(q.shape[0]):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            for part in slices:
                rows, keys = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
                heads = q[b, rows, own], k[b, keys, h], v[b, keys, h]
                _forward_head(*heads, scale, part, out[b, rows, own], lse[b, own, rows], fresh, poll)


@upcast_halves
def backward(dout, q, k, v, out, lse, scale, slices, dq, dk, dv, poll=nothing, fresh=False):
    """Add the gradients that one block of keys gives to dq, dk and dv, which are of the dtype of lse.

    Shapes as for `forward`; out, of the dtype of q, and lse are the results over all blocks. `fresh`: this is the only
    block, and dq, dk and dv are set: they hold nothing yet, and may be of the dtype of q.
    """
    if fresh:
        for gradient in (dq, dk, dv):
            gradient.fill(0)
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    for b in range(q.shape[0]):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            for part in slices:
                rows, keys = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
                queries = _with_column(q[b, rows, own], scale, _hidden_if_empty(lse[b, own, rows]).T)
                delta = np.vecdot(dout[b, rows, own], out[b, rows, own])
                gradients = _with_column(dout[b, rows, own], 1, -delta)
                block = _with_column(k[b, keys, h, None], 1, 1), _with_column(v[b, keys, h, None], 1, 1)
                results = dq[b, rows, own], dk[b, keys, h], dv[b, keys, h]
                _backward_head(queries, gradients, block, group, scale, part, results, poll)


def _hidden_if_empty(lse):
    """-lse, and -inf for a row that sees nothing, whose probabilities are then 0."""
    return np.where(np.isneginf(lse), lse, -lse)


def _forward_head(q, k, v, scale, part, out, lse, fresh, poll):
    """One key head and slice: q (seq, group, dim), k and v (keys, dim), out (seq, group, dim), lse (group, seq)."""
    seq, group, dim = q.shape
    width = v.shape[1]
    queries = _with_column(q, scale, 0)
    top = np.sqrt(np.vecdot(queries[:, :dim], queries[:, :dim]))[:, None]
    np.multiply(top, np.sqrt(np.vecdot(k, k).max()), out=top)
    np.negative(top, out=queries[:, dim:])
    keys, ones = _with_column(k[:, None], 1, 1), np.ones((KEYS, 1), k.dtype)
    values = np.ascontiguousarray(v)
    acc, total = np.empty((seq * group, width), q.dtype), np.empty((seq * group, 1), q.dtype)
    tile = _bounded if 2 * top.max() < _SAFE[q.dtype] else _online
    for start, stop, first, end in _row_tiles(part, group):
        rows = slice(start * group, stop * group)
        mask = _Mask(part, group, start, q.dtype)
        tile(queries[rows], keys, values, ones, mask, first, end, acc[rows], total[rows], top[rows])
        poll()
    np.divide(acc, total, out=acc)
    np.log(total, out=total)
    np.add(total, top, out=total)
    found, found_lse = acc.reshape(seq, group, width), total.reshape(seq, group)
    if fresh:
        out[...], lse[...] = found, found_lse.T
    else:
        merge(out, lse.T, found, found_lse)


def _backward_head(queries, gradients, block, group, scale, part, results, poll):
    """One key head and slice: the first four as rows with their extra column; dq (seq, group, dim), dk (keys, dim)."""
    (keys, values), (dq, dk, dv) = block, results
    seq, _, dim = dq.shape
    dqueries = np.empty((seq * group, dim), dq.dtype)
    dkeys, dvalues = np.zeros((len(keys), dim), dq.dtype), np.zeros((len(keys), dv.shape[1]), dq.dtype)
    for start, stop, first, end in _row_tiles(part, group):
        rows = slice(start * group, stop * group)
        mask = _Mask(part, group, start, dq.dtype)
        _backward_tile(queries[rows], gradients[rows], keys, values, mask, first, end, dqueries[rows], dkeys, dvalues)
        poll()
    np.multiply(dqueries, scale, out=dqueries)
    np.add(dq, dqueries.reshape(dq.shape), out=dq)
    np.add(dk, dkeys, out=dk)
    np.add(dv, dvalues, out=dv)


def _with_column(x, scale, value):
    """x (seq, group, dim) times `scale` as rows (seq * group, dim + 1), the last column being `value`."""
    seq, group, dim = x.shape
    rows = np.empty((seq, group, dim + 1), x.dtype)
    np.multiply(x, scale, out=rows[..., :dim])
    rows[..., dim] = value
    return rows.reshape(seq * group, dim + 1)


def _row_tiles(part, group):
    """(start, stop, first, end) of each tile of queries: rows start ... stop - 1 see keys first ... end - 1 at most."""
    seq, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
    step = max(1, ROWS // group)
    for start in range(0, seq, step):
        stop = min(start + step, seq)
        first = 0 if part.low is None else max(0, start + part.low)
        end = keys if part.high is None else min(keys, stop + part.high)
        yield start, stop, first, end


@lru_cache(maxsize=64)
def _corner(group, dtype, upper):
    """0 where row r of a tile sees column c of a square, else -inf: c <= r where `upper` bounds keys, c >= r else."""
    step = max(1, ROWS // group)
    seen = np.tri(step, dtype=bool)
    square = np.where(seen if upper else seen.T, dtype.type(0), dtype.type(-np.inf)).repeat(group, axis=0)
    square.flags.writeable = False
    return square


class _Mask:
    """Adds -inf to the hidden keys of a tile of rows from `start`.

    Before the exponential, not after: the exponent of a hidden key may be anything, and its exponential overflow.
    """

    __slots__ = ("corners",)

    def __init__(self, part, group, start, dtype):
        bounds = ((part.high, True), (part.low, False))
        self.corners = [(start + bound, _corner(group, dtype, upper)) for bound, upper in bounds if bound is not None]

    def hide(self, exponents, first):
        """`exponents` (rows, keys) of keys from `first` on."""
        end = first + exponents.shape[1]
        for column, corner in self.corners:
            low, high = max(first, column), min(end, column + corner.shape[1])
            if low < high:
                part = exponents[:, low - first : high - first]
                np.add(part, corner[: len(part), low - column : high - column], out=part)


def _bounded(queries, keys, values, ones, mask, first, end, acc, total, _top):
    """Unnormalised output and sum of exponentials of each row, relative to the bound in the column of `queries`."""
    for start in range(first, end, KEYS):
        at = slice(start, min(start + KEYS, end))
        scores = np.matmul(queries, keys[at].T)
        mask.hide(scores, start)
        np.exp(scores, out=scores)
        if start == first:
            np.matmul(scores, values[at], out=acc)
            np.matmul(scores, ones[: scores.shape[1]], out=total)
        else:
            np.add(acc, np.matmul(scores, values[at]), out=acc)
            np.add(total, np.matmul(scores, ones[: scores.shape[1]]), out=total)


def _online(queries, keys, values, ones, mask, first, end, acc, total, top):
    """As _bounded, relative to the running maximum, which it leaves in `top`: right for scores of any size."""
    acc[...], total[...], top[...] = 0, 0, -np.inf
    for start in range(first, end, KEYS):
        at = slice(start, min(start + KEYS, end))
        scores = np.matmul(queries[:, :-1], keys[at, :-1].T)
        mask.hide(scores, start)
        high = np.maximum(top, scores.max(1, keepdims=True))
        anchor = np.where(np.isneginf(high), 0, high)  # a row that sees no key of this tile, nor of those before it
        np.subtract(scores, anchor, out=scores)
        np.exp(scores, out=scores)
        shrink = np.exp(top - anchor)
        np.multiply(acc, shrink, out=acc)
        np.multiply(total, shrink, out=total)
        np.add(acc, np.matmul(scores, values[at]), out=acc)
        np.add(total, np.matmul(scores, ones[: scores.shape[1]]), out=total)
        top[...] = high


def _backward_tile(queries, gradients, keys, values, mask, first, end, dqueries, dkeys, dvalues):
    """Set dqueries to dS k, and add to dkeys and dvalues."""
    dim, width = dqueries.shape[1], dvalues.shape[1]
    for start in range(first, end, KEYS):
        at = slice(start, min(start + KEYS, end))
        weights = np.matmul(queries, keys[at].T)
        mask.hide(weights, start)
        np.exp(weights, out=weights)
        slopes = np.matmul(gradients, values[at].T)
        np.multiply(slopes, weights, out=slopes)
        dvalues[at] += np.matmul(weights.T, gradients[:, :width])
        dkeys[at] += np.matmul(slopes.T, queries[:, :dim])
        if start == first:
            np.matmul(slopes, keys[at, :dim], out=dqueries)
        else:
            np.add(dqueries, np.matmul(slopes, keys[at, :dim]), out=dqueries)
