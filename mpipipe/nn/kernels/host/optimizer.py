"""Updates of flat buffers, in place and in pieces that stay in cache, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpipipe.nn.cache_blocks import blocks


def adamw(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    b1: float,
    b2: float,
    eps: float,
    rate: float,
    correction1: float,
    correction2: float,
    shrink: float,
    g_scale: float,
) -> None:
    """Make one step of AdamW, in place."""
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


def sgd(
    p: np.ndarray, g: np.ndarray, u: np.ndarray | None, *, momentum: float, decay: float, rate: float, g_scale: float
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    for at in blocks(p.size):
        part, update = p[at], _scaled(g[at], g_scale)
        if decay:
            update = update + part * decay
        if u is not None:
            kept = u[at]
            np.multiply(kept, momentum, out=kept)
            update = np.add(kept, update, out=kept)
        np.subtract(part, update * rate, out=part)


def _scaled(g: np.ndarray, factor: float) -> np.ndarray:
    return g if factor == 1 else np.multiply(g, factor)


def sums_of_squares(flat: np.ndarray, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64."""
    return np.array([_sum_of_squares(flat[start:stop]) for start, stop in offsets], np.float64)


def _sum_of_squares(flat: np.ndarray) -> float:
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
