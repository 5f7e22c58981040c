"""Updates of flat buffers, in place and in pieces that stay in cache, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpipipe.nn.cache_blocks import blocks


def adamw(p, g, m, v, *, b1, b2, eps, rate, correction1, correction2, shrink, g_scale):
    """One update of Adam: p = shrink p - rate (m / correction1) / (sqrt(v / correction2) + eps), with

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, correction1 = 1 - b1^t, correction2 = 1 - b2^t. g counts times
    `g_scale`.
    """
    step, root = rate / correction1, 1 / math.sqrt(correction2)
    for at in blocks(p.size):
        part, grad, first, second = p[at], _scaled(g[at], g_scale), m[at], v[at]
        work = np.multiply(grad, 1 - b1)
        np.multiply(first, b1, out=first)
        np.add(first, work, out=first)
        np.multiply(grad, grad, out=work)
        np.multiply(work, 1 - b2, out=work)
        np.multiply(second, b2, out=second)
        np.add(second, work, out=second)
        np.sqrt(second, out=work)
        np.multiply(work, root, out=work)
        np.add(work, eps, out=work)
        np.divide(first, work, out=work)
        np.multiply(work, step, out=work)
        if shrink != 1:
            np.multiply(part, shrink, out=part)
        np.subtract(part, work, out=part)


def sgd(p, g, u, *, momentum, decay, rate, g_scale):
    """u = momentum u + g + decay p; p -= rate u. g counts times `g_scale`; u is None without momentum."""
    for at in blocks(p.size):
        part, update = p[at], _scaled(g[at], g_scale)
        if decay:
            update = update + part * decay
        if u is not None:
            kept = u[at]
            np.multiply(kept, momentum, out=kept)
            update = np.add(kept, update, out=kept)
        np.subtract(part, update * rate, out=part)


def _scaled(g, factor):
    return g if factor == 1 else np.multiply(g, factor)


def sums_of_squares(flat, offsets: Sequence[tuple[int, int]]):
    """For each (start, stop) the sum of flat[start:stop]^2, in float64."""
    return np.array([_sum_of_squares(flat[start:stop]) for start, stop in offsets], np.float64)


def _sum_of_squares(flat) -> float:
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
