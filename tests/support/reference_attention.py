"""Attention on whole matrices of scores in float64, and how far rounding may move another way to compute it.

With P the weights of a row, X = dP - D what they multiply in the backward (dP = dout v, D = P dP), and A + B the terms
of X without their signs (A = |dout| |v|, B = P A), errors go this way, in units of eps:

- score: an error s = dim (1 + 2 |q| max |k|), since a kernel may subtract the bound |q| max |k| within the product. It
  enters an exponential, so that it is the relative error of a weight;
- out = P v: s moves weights between keys, so it counts with the deviation of v from out, sqrt(P v^2 - out^2) at most
  (Jensen); the sums over the keys count with P |v|. A merge of two blocks, out + w (out' - out), rounds a difference of
  outputs, each of which may be as large as the largest v, even where w is 1 and the first of them no longer counts;
- lse: s, and the sum over the keys;
- weights of the backward, exp(score - lse): twice s, and the sum. They multiply X, which may have lost its digits: it
  errs by value_dim (A + B), and by |dout| times the error of out;
- dq = X P k, dk, dv: sums over keys and rows of these.

Half precision computes in float32, but may round weights, slopes and the output of the forward before they are used.
cuDNN's kernels may take powers and logarithms to the base 2 from the GPU, which err by 2 eps (PTX ISA, ex2.approx and
lg2.approx: 2^-22). MORE has room for both, and for the factors log2(e) and ln(2) with which scores get there and back.
"""

from functools import cached_property

import numpy as np

from mpipipe.arrays import accumulator
from support.tolerance import eps, rounding, spread, within

NAMES = ("out", "lse", "dq", "dk", "dv")
MORE = 24  # operations besides those of the sums: scale, bound, exponential, logarithm, merging of weights
MERGES = 8  # of the outputs of blocks


class Dense:
    """(out, lse, dq, dk, dv) by index and by iteration; rows that see nothing give zeros and -inf."""

    def __init__(self, q, k, v, dout, seen, scale=None):
        """Arrays (batch, sequence, heads, dim); seen (queries, keys) of bool: who sees whom."""
        self.q, self.k, self.v, self.dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
        self.group = self.q.shape[2] // self.k.shape[2]
        self.scale = self.q.shape[3] ** -0.5 if scale is None else scale
        scores = np.where(seen, self.scale * _inner(self.q, self._wide(self.k)), -np.inf)
        high = np.where(seen.any(-1)[..., None], scores.max(-1, initial=-np.inf, keepdims=True), 0)
        weights = np.exp(scores - high)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            self.lse = (high + np.log(total))[..., 0]
        self.weights = weights / np.where(total == 0, 1, total)
        self.inner = _inner(self.dout, self._wide(self.v))
        self.inner -= (self.weights * self.inner).sum(-1, keepdims=True)

    def __getitem__(self, index):
        return self.results[index]

    def __iter__(self):
        return iter(self.results)

    @cached_property
    def results(self):
        gradients = self._gradients(self.weights, self.weights * self.inner, self.q, self.k, self.dout)
        return _outer(self.weights, self._wide(self.v)), self.lse, *gradients

    def _wide(self, x):
        return np.repeat(x, self.group, 2)

    def _gradients(self, weights, slopes, q, k, dout):
        """(dq, dk, dv)"""
        dk, dv = self.scale * _outer(slopes.swapaxes(2, 3), q), _outer(weights.swapaxes(2, 3), dout)
        return self.scale * _outer(slopes, self._wide(k)), *(
            x.reshape(*self.k.shape[:3], self.group, x.shape[3]).sum(3) for x in (dk, dv)
        )

    def _moved(self, output, weight, inner):
        """(dq, dk, dv) of errors of out, and of relative errors of the weights and of the terms of X."""
        q, k, v, dout = (np.abs(x) for x in (self.q, self.k, self.v, self.dout))
        terms = _inner(dout, self._wide(v))
        terms += (self.weights * terms).sum(-1, keepdims=True)
        through_out = (dout * output).sum(-1).transpose(0, 2, 1)[..., None]
        slopes = self.weights * (weight * np.abs(self.inner) + inner * terms + through_out)
        return self._gradients(self.weights * (weight + inner), slopes, q, k, dout)

    def bounds(self, dtype):
        """How far each of NAMES may be from here when computed in `dtype`."""
        sizes = [np.sqrt((x * x).sum(-1)) for x in (self.q, self.k)]
        farthest = np.repeat(sizes[1].max(1, initial=0), self.group, 1)[..., None]
        largest = self.scale * sizes[0].transpose(0, 2, 1) * farthest
        score = spread(self.q.shape[3] + MORE) * (1 + 2 * largest[..., None])
        keys = spread(self.k.shape[1] + MORE)
        inner = spread(max(self.v.shape[3], self.k.shape[1], self.q.shape[1] * self.group) + MORE)
        values = self._wide(self.v)
        terms = _outer(self.weights, np.abs(values))
        apart = np.sqrt(np.maximum(_outer(self.weights, values**2) - self[0] ** 2, 0))
        merges = MERGES * np.abs(values).max(1, initial=0, keepdims=True)
        output = score[..., 0].transpose(0, 2, 1)[..., None] * apart + keys * terms + merges
        lse = np.where(np.isneginf(self.lse), 0, score[..., 0] + keys)
        computed, dtype = accumulator(np.dtype(dtype)), np.dtype(dtype)
        found = [output, lse, *self._moved(output, 2 * score + keys, inner)]
        found = [eps(computed) * error for error in found]
        if computed != dtype:
            once = [terms, 0, *self._moved(terms + np.abs(self[0]), 2, 0)]
            found = [error + eps(dtype) * more for error, more in zip(found, once)]
        kinds = dtype, computed, dtype, dtype, dtype
        return [error + rounding(kind, np.abs(right) + error) for error, kind, right in zip(found, kinds, self)]


def _inner(rows, columns):
    return np.einsum("bihd,bjhd->bhij", rows, columns, optimize=True)


def _outer(weights, columns):
    return np.einsum("bhij,bjhd->bihd", weights, columns, optimize=True)


def visible_pairs(queries, keys, causal=True, window=None, documents=None):
    """Which of so many queries sees which of so many keys, whose positions both start at 0.

    documents : where each begins, and the end
    """
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= i - j < window
    if documents is not None:
        seen &= np.searchsorted(documents, i, "right") == np.searchsorted(documents, j, "right")
    return seen


def dense(q, k, v, dout, causal=True, window=None, documents=None, scale=None):
    """Dense attention; see `visible_pairs`."""
    return Dense(q, k, v, dout, visible_pairs(q.shape[1], k.shape[1], causal, window, documents), scale)


def agrees(found, expected):
    """`found`, in the order of NAMES and of the dtype of its first, is `expected` up to rounding."""
    for name, one, other, allowed in zip(NAMES, found, expected, expected.bounds(found[0].dtype)):
        within(one, other, allowed, f"{name} ({found[0].dtype.name})")


def agrees_by_row(found, whole, segments, window=None):
    """Each row of `found`, lse (batch, heads, seq), is dense attention to the documents of that row of `whole`."""
    for number, row in enumerate(segments):
        documents, one = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)], slice(number, number + 1)
        agrees([x[one] for x in found], dense(*[x[one] for x in whole], True, window, documents))
