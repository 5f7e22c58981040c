"""Updates of flat buffers, in place and in pieces that stay in cache, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from mpipipe.nn.kernels.host import blocks

Ranges: TypeAlias = "Sequence[tuple[int, int, bool]] | None"  # (start, stop, whether weight decay applies)


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
    ranges: Ranges = None,
    copy: np.ndarray | None = None,
) -> None:
    """Make one step of AdamW, in place."""
    step, root = rate / correction1, 1 / math.sqrt(correction2)
    for at, decays in _pieces(p.size, ranges):
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
        if decays and shrink != 1:
            np.multiply(part, shrink, out=part)
        np.subtract(part, work, out=part)
        if copy is not None:
            _round(part, copy[at])


def sgd(
    p: np.ndarray,
    g: np.ndarray,
    u: np.ndarray | None,
    *,
    momentum: float,
    decay: float,
    rate: float,
    g_scale: float,
    ranges: Ranges = None,
    copy: np.ndarray | None = None,
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    for at, decays in _pieces(p.size, ranges):
        part, update = p[at], _scaled(g[at], g_scale)
        if decays and decay:
            update = update + part * decay
        if u is not None:
            kept = u[at]
            np.multiply(kept, momentum, out=kept)
            update = np.add(kept, update, out=kept)
        np.subtract(part, update * rate, out=part)
        if copy is not None:
            _round(part, copy[at])


def _pieces(size: int, ranges: Ranges) -> Iterator[tuple[slice, bool]]:
    """Yield the pieces that stay in cache, none across two ranges, and whether weight decay applies to them."""
    for start, stop, decays in [(0, size, True)] if ranges is None else ranges:
        for at in blocks(stop - start):
            yield slice(start + at.start, min(stop, start + at.stop)), decays


def _round(part: np.ndarray, copy: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        copy[...] = part


def _scaled(g: np.ndarray, factor: float) -> np.ndarray:
    return g if factor == 1 else np.multiply(g, factor)


def sums_of_squares(flat: np.ndarray, offsets: Sequence[tuple[int, int]], out: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64; in `out` where that is given."""
    out = np.empty(len(offsets)) if out is None else out
    out[:] = [_sum_of_squares(flat[start:stop]) for start, stop in offsets]
    return out


def _sum_of_squares(flat: np.ndarray) -> float:
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
