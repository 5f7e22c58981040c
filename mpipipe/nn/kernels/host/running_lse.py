"""The sums of a `HeadSlice` on the host, for every dtype; nn/layers/head_slices.py has the formulas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.arrays import float32_like, round_into, upcast
from mpipipe.nn.kernels.host import blocks
from mpipipe.processor import each


def running_lse(
    logits: np.ndarray,
    ids: np.ndarray,
    columns: tuple[int, int],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
) -> None:
    """Set L and t from those before and some columns of logits."""

    def work(at: slice) -> None:
        part, lse, t, carried = upcast(logits[at]), after[0][at], after[1][at], before[0][at]
        top = np.maximum(part.max(1), carried)
        powers = np.subtract(part, top[:, None])
        np.add.reduce(np.exp(powers, out=powers), 1, out=lse)
        np.add(lse, np.exp(carried - top), out=lse)
        np.add(np.log(lse, out=lse), top, out=lse)
        t[...] = before[1][at]
        rows, hits = _hits(ids[at], columns[0], part.shape[1])
        t[rows] += part[rows, hits]

    each(work, blocks(*logits.shape))


def running_lse_backward(
    logits: np.ndarray, ids: np.ndarray, first: int, lse: np.ndarray, slopes: Sequence[np.ndarray], out: np.ndarray
) -> None:
    """Set the gradient of the logits."""

    def work(at: slice) -> None:
        part = float32_like(out[at])
        np.subtract(upcast(logits[at]), lse[at, None], out=part)
        np.multiply(np.exp(part, out=part), slopes[0][at, None], out=part)
        rows, hits = _hits(ids[at], first, part.shape[1])
        part[rows, hits] += slopes[1][at][rows]
        round_into(out[at], part)

    each(work, blocks(*logits.shape))


def _hits(ids: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows whose ids are among `count` columns from `first` on, and in which of these each is."""
    columns = ids.astype(np.int64) - first
    rows = np.flatnonzero((columns >= 0) & (columns < count))
    return rows, columns[rows]
