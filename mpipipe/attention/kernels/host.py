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
"""

from __future__ import annotations

import numpy as np

ROWS = 128  # of one tile of scores
KEYS = 512  # columns of one tile: a tile is 256 KiB of float32
_SAFE = {np.dtype(np.float32): 80.0, np.dtype(np.float64): 700.0}  # exp(-these) is a normal number


def forward(q, k, v, scale, causal):
    """Return out, shaped as q, and the log-sum-exp of each row's scores, (batch, heads, seq).

    Shapes as in `attention.Local`, any strides.
    """
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    out = np.empty((batch, seq, heads, dim), q.dtype)
    lse = np.empty((batch, heads, seq), q.dtype)
    cap = _diagonal(group, q.dtype) if causal else None
    for b in range(batch):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            _forward_head(q[b, :, own], k[b, :, h], v[b, :, h], scale, cap, out[b, :, own], lse[b, own])
    return out, lse


def backward(dout, q, k, v, out, lse, scale, causal):
    """Return (dq, dk, dv), shaped as q, k, v, from the results of `forward`."""
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    dq, dk, dv = np.empty(q.shape, q.dtype), np.empty(k.shape, q.dtype), np.empty(k.shape, q.dtype)
    cap = _diagonal(group, q.dtype) if causal else None
    for b in range(batch):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            queries = _with_column(q[b, :, own], scale, -lse[b, own].T)
            gradients = _with_column(dout[b, :, own], 1, -np.vecdot(dout[b, :, own], out[b, :, own]))
            keys, values = (_with_column(x[b, :, h, None], 1, 1) for x in (k, v))
            results = dq[b, :, own], dk[b, :, h], dv[b, :, h]
            _backward_head(queries, gradients, keys, values, group, scale, cap, *results)
    return dq, dk, dv


def _forward_head(q, k, v, scale, cap, out, lse):
    """One key head: q and out (seq, group, dim), k and v (keys, dim), lse (group, seq)."""
    seq, group, dim = q.shape
    queries = _with_column(q, scale, 0)
    top = np.sqrt(np.vecdot(queries[:, :dim], queries[:, :dim]))[:, None]
    np.multiply(top, np.sqrt(np.vecdot(k, k).max()), out=top)
    np.negative(top, out=queries[:, dim:])
    keys, ones = _with_column(k[:, None], 1, 1), np.ones((len(k), 1), k.dtype)
    acc, total = np.empty((seq * group, dim), q.dtype), np.empty((seq * group, 1), q.dtype)
    tile = _bounded if seq == 0 or 2 * top.max() < _SAFE[q.dtype] else _online
    for start, stop, end in _row_tiles(seq, len(keys), group, cap is not None):
        rows = slice(start * group, stop * group)
        tile(queries[rows], keys[:end], v[:end], ones, cap, start, acc[rows], total[rows], top[rows])
    np.divide(acc.reshape(q.shape), total.reshape(seq, group, 1), out=out)
    np.log(total, out=total)
    np.add(total, top, out=total)
    lse[...] = total.reshape(seq, group).T


def _backward_head(queries, gradients, keys, values, group, scale, cap, dq, dk, dv):
    """One key head: the first four as rows with their extra column, dq (seq, group, dim), dk and dv (keys, dim)."""
    seq, _, dim = dq.shape
    dqueries = np.empty((seq * group, dim), dq.dtype)
    dkeys, dvalues = np.empty((2, len(keys), dim), dq.dtype)
    tiles = list(_row_tiles(seq, len(keys), group, cap is not None))
    seen = tiles[-1][2] if tiles else 0  # the last rows see the most keys: they go first and fill what others add to
    dkeys[seen:], dvalues[seen:] = 0, 0
    for start, stop, end in reversed(tiles):
        rows, fresh = slice(start * group, stop * group), stop == seq
        tile = queries[rows], gradients[rows], keys[:end], values[:end]
        _backward_tile(*tile, cap, start, fresh, dqueries[rows], dkeys, dvalues)
    np.multiply(dqueries.reshape(dq.shape), scale, out=dq)
    dk[...], dv[...] = dkeys, dvalues


def _with_column(x, scale, value):
    """x (seq, group, dim) times `scale` as rows (seq * group, dim + 1), the last column being `value`."""
    seq, group, dim = x.shape
    rows = np.empty((seq, group, dim + 1), x.dtype)
    np.multiply(x, scale, out=rows[..., :dim])
    rows[..., dim] = value
    return rows.reshape(seq * group, dim + 1)


def _row_tiles(seq, keys, group, causal):
    """(start, stop, end) of each tile of queries: rows start ... stop - 1 see keys 0 ... end - 1 at most."""
    step = max(1, ROWS // group)
    for start in range(0, seq, step):
        stop = min(start + step, seq)
        yield start, stop, min(stop, keys) if causal else keys


def _diagonal(group, dtype):
    """0 where row r of a tile sees key c of the square on the diagonal, else minus infinity."""
    step = max(1, ROWS // group)
    return np.where(np.tri(step, dtype=bool), dtype.type(0), dtype.type(-np.inf)).repeat(group, axis=0)


def _hide(exponents, cap, start, first):
    """Add minus infinity to the hidden keys of a tile of rows from `start` and keys from `first`.

    Before the exponential, not after: the exponent of a hidden key may be anything, and its exponential overflow.
    """
    low = max(first, start)
    end = first + exponents.shape[1]
    if cap is not None and end > start + 1:
        part = exponents[:, low - first :]
        np.add(part, cap[: len(part), low - start : end - start], out=part)


def _bounded(queries, keys, values, ones, cap, start, acc, total, _top):
    """Unnormalised output and sum of exponentials of each row, relative to the bound in the column of `queries`."""
    for first in range(0, len(keys), KEYS):
        at = slice(first, first + KEYS)
        scores = np.matmul(queries, keys[at].T)
        _hide(scores, cap, start, first)
        np.exp(scores, out=scores)
        if first == 0:
            np.matmul(scores, values[at], out=acc)
            np.matmul(scores, ones[: scores.shape[1]], out=total)
        else:
            np.add(acc, np.matmul(scores, values[at]), out=acc)
            np.add(total, np.matmul(scores, ones[: scores.shape[1]]), out=total)


def _online(queries, keys, values, ones, cap, start, acc, total, top):
    """As _bounded, relative to the running maximum, which it leaves in `top`: right for scores of any size."""
    acc[...], total[...], top[...] = 0, 0, -np.inf
    for first in range(0, len(keys), KEYS):
        at = slice(first, first + KEYS)
        scores = np.matmul(queries[:, :-1], keys[at, :-1].T)
        _hide(scores, cap, start, first)
        high = np.maximum(top, scores.max(1, keepdims=True))
        np.subtract(scores, high, out=scores)
        np.exp(scores, out=scores)
        shrink = np.exp(top - high)
        np.multiply(acc, shrink, out=acc)
        np.multiply(total, shrink, out=total)
        np.add(acc, np.matmul(scores, values[at]), out=acc)
        np.add(total, np.matmul(scores, ones[: scores.shape[1]]), out=total)
        top[...] = high


def _backward_tile(queries, gradients, keys, values, cap, start, fresh, dqueries, dkeys, dvalues):
    """Set dqueries to dS k, and add to dkeys and dvalues, or set them where `fresh`."""
    dim = dqueries.shape[1]
    for first in range(0, len(keys), KEYS):
        at = slice(first, min(first + KEYS, len(keys)))
        weights = np.matmul(queries, keys[at].T)
        _hide(weights, cap, start, first)
        np.exp(weights, out=weights)
        slopes = np.matmul(gradients, values[at].T)
        np.multiply(slopes, weights, out=slopes)
        _product(weights.T, gradients[:, :dim], dvalues[at], fresh)
        _product(slopes.T, queries[:, :dim], dkeys[at], fresh)
        _product(slopes, keys[at, :dim], dqueries, first == 0)


def _product(a, b, out, fresh):
    """out = a b where `fresh`, else out += a b."""
    if fresh:
        np.matmul(a, b, out=out)
    else:
        np.add(out, np.matmul(a, b), out=out)
