"""Rows of a table by number, and their gradient, on a GPU."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.errors import ArgumentError
from mpipipe.nn.kernels.cuda.launch import FOLDER, check_contiguous, over, word

EMBED = FOLDER / "embed.cu"
TILE = 1024  # rows that are counted together, as in embed.cu
SPAN = 32  # sorted rows that are added by one thread, as there
THREADS = 128


def check_ids(ids):
    """Raise ArgumentError unless device ids are of a dtype that the kernels read."""
    if ids.dtype.name not in ("int32", "int64"):
        raise ArgumentError(
            "ids on a GPU have the wrong dtype", found=ids.dtype.name, expected="int32 or int64", remedy="convert them"
        )


def embed(weight, ids):
    """Row `id` of the table for each id, NaN for ids outside: shape (...) to (..., dim)."""
    check_ids(ids)
    check_contiguous("embed", weight, ids)
    vocab, dim = weight.shape
    y = arrays.empty((*ids.shape, dim), weight.dtype, "cuda")
    args = (weight, ids, y, np.int64(y.size), np.int64(dim), np.int64(vocab))
    over(EMBED, "embed", y.size, args, T=weight.dtype, I=ids.dtype, V=word(weight, y, divides=dim))
    return y


def embed_backward(dy, ids, grad):
    """Add each row of dy (..., dim) to the row of grad (vocab, dim) that its id names; ids outside are left out.

    The rows of one id are added in their order, at first within spans of 32 rows in the order of their ids.
    """
    check_ids(ids)
    check_contiguous("embed_backward", dy, ids, grad)
    count, (vocab, dim) = ids.size, grad.shape
    if not dy.size:
        return
    width = word(dy, grad, divides=dim)
    facts = {"T": dy.dtype, "I": ids.dtype, "V": width}
    order, keys, starts = _sorted(ids, count, vocab, facts)
    spans = -(-count // SPAN)
    parts = arrays.empty((2, spans, dim), grad.dtype, "cuda")
    work = spans * (dim // width)
    numbers = (np.int64(work), np.int32(count), np.int64(dim), np.int32(vocab))
    shape = (-(-work // THREADS),), (THREADS,)
    arrays.cuda_function(EMBED, "add_spans", **facts)(*shape, (dy, order, keys, grad, parts, *numbers))
    if spans > 1:
        arrays.cuda_function(EMBED, "join_spans", **facts)(*shape, (keys, starts, grad, parts, *numbers))


def _sorted(ids, count, vocab, facts):
    """The rows in the order of their ids, equal ids in the order of rows; their ids; where each id starts."""
    tiles, groups = -(-count // TILE), -(-(vocab + 1) // TILE)
    tally = arrays.zeros((tiles, vocab + 1), np.dtype(np.int32), "cuda")
    totals, starts, order, keys = (
        arrays.empty((size,), np.dtype(np.int32), "cuda") for size in (groups, vocab + 1, count, count)
    )
    rows, table = (np.int32(count), np.int32(vocab)), (np.int32(tiles), np.int32(vocab))
    arrays.cuda_function(EMBED, "tally_ids", **facts)((tiles,), (TILE,), (ids, tally, *rows))
    arrays.cuda_function(EMBED, "total_tallies", **facts)((groups,), (TILE,), (tally, totals, *table))
    arrays.cuda_function(EMBED, "place_tallies", **facts)((groups,), (TILE,), (tally, totals, starts, *table))
    arrays.cuda_function(EMBED, "sort_rows", **facts)((tiles,), (TILE,), (ids, tally, order, keys, *rows))
    return order, keys, starts
