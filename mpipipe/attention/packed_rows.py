"""Rows of a batch that hold several documents each: they are attended to as one sequence, row behind row.

    row 0   a a a b b b b b        as one sequence   a a a b b b b b|c c c c c c d d
    row 1   c c c c c c d d

A row begins a document, so nothing is seen across rows, and one call does them all.
"""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import Array
from mpipipe.attention.mask import document_offsets
from mpipipe.errors import ArgumentError


def documents_of_rows(segments: np.ndarray, batch: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each row, where its documents begin, rising from 0, and its length at the end.

    Parameters
    ----------
    segments : (batch, seq) integers, the document of each position; equal numbers of a row stand together
    batch : number of rows

    Raises ArgumentError for another shape, and for documents whose positions do not stand together.
    """
    numbers = np.asarray(segments)
    if numbers.ndim != 2 or len(numbers) != batch or numbers.dtype.kind not in "iu":
        raise ArgumentError(
            "segments of a forward",
            found=f"{numbers.dtype}{list(numbers.shape)}",
            expected=f"integers ({batch}, seq), the document of each position of each row",
        )
    return tuple(tuple(document_offsets(row, numbers.shape[1]) or ()) for row in numbers)


def offsets_in_one(rows: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return where documents begin in the one sequence of all rows, and its length at the end."""
    seq = rows[0][-1] if rows else 0
    return [row * seq + start for row, offsets in enumerate(rows) for start in offsets[:-1]] + [len(rows) * seq]


def as_one_sequence(x: Array) -> Array:
    """Return (1, batch * seq, heads, dim) of an array (batch, seq, heads, dim): a view where its strides allow it."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def by_rows(x: Array, batch: int) -> Array:
    """Return a contiguous array (1, batch * seq, heads, dim) as (batch, seq, heads, dim); others as they are."""
    return x if x.shape[0] == batch else x.reshape(batch, x.shape[1] // batch, *x.shape[2:])


def writable_as_one(x: Array) -> bool:
    """Whether `as_one_sequence` of an array is a view, so that what is written to it arrives."""
    return x.shape[0] == 1 or x.strides[0] == x.shape[1] * x.strides[1]


def like(dout: Array, out: Array) -> Array:
    """Return a gradient in the shape of what a forward has saved of its output, where it has as many elements."""
    return dout.reshape(out.shape) if dout.shape != out.shape and dout.size == out.size else dout
