"""Optimizers and sums of squares on flat buffers of float32 or float64, in place and in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import numpy as np

from mpipipe.nn.kernels.host import ELEMENTS, HostArray, blocks
from mpipipe.nn.kernels.interface import AdamWNumbers, Update
from mpipipe.processor import each


def adamw(
    p: HostArray, g: HostArray, m: HostArray, v: HostArray, numbers: AdamWNumbers, update: Update
) -> None:
    """Make one step of AdamW, in place."""
    b1, b2, eps, rate, correction1, correction2, shrink = numbers
    step = rate / correction1
    root = 1 / math.sqrt(correction2)

    def change(at: slice, part: HostArray, grad: HostArray) -> None:
        first = m[at]
        second = v[at]
        work = grad * (1 - b1)
        first *= b1
        first += work
        np.multiply(grad, grad, out=work)
        work *= 1 - b2
        second *= b2
        second += work
        np.sqrt(second, out=work)
        work *= root
        work += eps
        np.divide(first, work, out=work)
        work *= step
        if shrink != 1:
            part *= shrink
        part -= work

    _update(change, p, g, update)


def sgd(
    p: HostArray,
    g: HostArray,
    u: HostArray | None,
    momentum: float,
    decay: float,
    rate: float,
    update: Update,
) -> None:
    """Make one step of gradient descent, in place; u is None without momentum."""

    def change(at: slice, part: HostArray, grad: HostArray) -> None:
        added = grad
        if decay:
            added = grad + part * decay
        if u is not None:
            moving = u[at]
            moving *= momentum
            moving += added
            added = moving
        part -= added * rate

    _update(change, p, g, update)


def _update(
    change: Callable[[slice, HostArray, HostArray], None],
    p: HostArray,
    g: HostArray,
    update: Update,
) -> None:
    """Call change(piece, parameters, scaled gradients) for pieces."""

    def work(at: slice) -> None:
        gradients = g[at]
        if update.g_scale != 1:
            gradients = gradients * update.g_scale
        change(at, p[at], gradients)
        if update.copy is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                update.copy[at] = p[at]

    each(work, blocks(p.size))


# -- Sums ------------------------------------------------------------------------------------------


def sums_of_squares(
    flat: HostArray, offsets: Sequence[tuple[int, int]], out: HostArray | None = None
) -> HostArray:
    """Return the sum of flat[start:stop]^2 for each (start, stop), in float64."""
    if out is None:
        out = np.empty(len(offsets))
    out[:] = [sum_of_squares(flat[start:stop]) for start, stop in offsets]
    return out


def sum_of_squares(flat: HostArray) -> float:
    """Return the sum of flat^2, in float64."""
    # Small losses need their sum in every micro-batch, so they pass by the loop.
    if flat.size <= ELEMENTS:
        wide = flat.astype(np.float64, copy=False)
        return float(wide.dot(wide))
    return summed(blocks(flat.size), lambda at: sum_of_squares(flat[at]))


def summed(pieces: Sequence[slice], term: Callable[[slice], float]) -> float:
    """Return the sum of term(piece) over all pieces, in their order."""
    terms = [0.0] * len(pieces)

    def work(number: int) -> None:
        terms[number] = term(pieces[number])

    each(work, range(len(pieces)))
    return reduce(add, terms, 0.0)  # `sum` of Python 3.12 rounds in another way
