"""Updates of flat buffers, in place and in pieces that stay in cache, and the sums of squares for their norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from mpipipe.nn.kernels.host import blocks
from mpipipe.nn.kernels.interface import AdamWNumbers, Update

WHOLE = Update()


def adamw(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, numbers: AdamWNumbers, update: Update = WHOLE
) -> None:
    """Make one step of AdamW, in place."""
    b1, b2, eps, rate, correction1, correction2, shrink = numbers
    step, root = rate / correction1, 1 / math.sqrt(correction2)
    for at, part, grad, decays in _pieces(p, g, update):
        first, second = m[at], v[at]
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


def sgd(
    p: np.ndarray,
    g: np.ndarray,
    u: np.ndarray | None,
    momentum: float,
    decay: float,
    rate: float,
    update: Update = WHOLE,
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""
    for at, part, grad, decays in _pieces(p, g, update):
        change = grad + part * decay if decays and decay else grad
        if u is not None:
            kept = u[at]
            np.multiply(kept, momentum, out=kept)
            change = np.add(kept, change, out=kept)
        np.subtract(part, change * rate, out=part)


def _pieces(p: np.ndarray, g: np.ndarray, update: Update) -> Iterator[tuple[slice, np.ndarray, np.ndarray, bool]]:
    """Yield (piece, parameters, scaled gradients, whether they decay), none across ranges; round each when it is done.

    Pieces stay in cache from the first pass to the last.
    """
    for start, stop, decays in [(0, p.size, True)] if update.ranges is None else update.ranges:
        for block in blocks(stop - start):
            at = slice(start + block.start, min(stop, start + block.stop))
            yield at, p[at], g[at] if update.g_scale == 1 else np.multiply(g[at], update.g_scale), decays
            if update.copy is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    update.copy[at] = p[at]


def sums_of_squares(flat: np.ndarray, offsets: Sequence[tuple[int, int]], out: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64; in `out` where that is given."""
    out = np.empty(len(offsets)) if out is None else out
    out[:] = [sum_of_squares(flat[start:stop]) for start, stop in offsets]
    return out


def sum_of_squares(flat: np.ndarray) -> float:
    """Return the sum of flat^2, in float64."""
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
