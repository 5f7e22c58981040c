"""Optimizers and sums of squares on flat buffers of float32 or float64, in place and in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add

import numpy as np

from mpipipe.nn.kernels.host import ELEMENTS, blocks
from mpipipe.nn.kernels.interface import AdamWNumbers, Update
from mpipipe.processor import each

WHOLE = Update()


def adamw(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    numbers: AdamWNumbers,
    update: Update = WHOLE,
) -> None:
    """Make one step of AdamW, in place."""
    b1, b2, eps, rate, correction1, correction2, shrink = numbers
    step = rate / correction1
    root = 1 / math.sqrt(correction2)

    def change(at: slice, part: np.ndarray, grad: np.ndarray, decays: bool) -> None:
        first = m[at]
        second = v[at]
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

    _update(change, p, g, update)


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

    def change(at: slice, part: np.ndarray, grad: np.ndarray, decays: bool) -> None:
        added = grad + part * decay if decays and decay else grad
        if u is not None:
            kept = u[at]
            np.multiply(kept, momentum, out=kept)
            added = np.add(kept, added, out=kept)
        np.subtract(part, added * rate, out=part)

    _update(change, p, g, update)


def _update(
    change: Callable[[slice, np.ndarray, np.ndarray, bool], None],
    p: np.ndarray,
    g: np.ndarray,
    update: Update,
) -> None:
    """Call change(piece, parameters, scaled gradients, whether they decay) for pieces within
    ranges; round each.
    """

    def work(piece: tuple[int, int, bool]) -> None:
        start, stop, decays = piece
        at = slice(start, stop)
        change(
            at, p[at], g[at] if update.g_scale == 1 else np.multiply(g[at], update.g_scale), decays
        )
        if update.copy is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                update.copy[at] = p[at]

    ranges = [(0, p.size, True)] if update.ranges is None else update.ranges
    pieces = [
        (start + at.start, start + at.stop, decays)
        for start, stop, decays in ranges
        for at in blocks(stop - start)
    ]
    each(work, pieces)


# -- Sums ------------------------------------------------------------------------------------------


def sums_of_squares(
    flat: np.ndarray, offsets: Sequence[tuple[int, int]], out: np.ndarray | None = None
) -> np.ndarray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64; in `out` where that
    is given.
    """
    out = np.empty(len(offsets)) if out is None else out
    cuts = [
        [slice(start + at.start, start + at.stop) for at in blocks(stop - start)]
        for start, stop in offsets
    ]
    terms = iter(_terms([at for cut in cuts for at in cut], lambda at: sum_of_squares(flat[at])))
    out[:] = [_in_order(next(terms) for _ in cut) for cut in cuts]
    return out


def sum_of_squares(flat: np.ndarray) -> float:
    """Return the sum of flat^2, in float64."""
    if (
        flat.size <= ELEMENTS
    ):  # a small loss is asked for its sum once a micro-batch: no loop around it
        wide = flat.astype(np.float64, copy=False)
        return float(wide.dot(wide))
    return summed(blocks(flat.size), lambda at: sum_of_squares(flat[at]))


def summed(pieces: Sequence[slice], term: Callable[[slice], float]) -> float:
    """Return the sum of term(piece) over all pieces, in their order."""
    return _in_order(_terms(pieces, term))


def _terms(pieces: Sequence[slice], term: Callable[[slice], float]) -> list[float]:
    terms = [0.0] * len(pieces)

    def work(number: int) -> None:
        terms[number] = term(pieces[number])

    each(work, range(len(pieces)))
    return terms


def _in_order(terms: Iterable[float]) -> float:
    """Return the sum; `sum` of Python 3.12 rounds in another way."""
    return reduce(add, terms, 0.0)
