"""Rows of a table by number, and their gradient, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import Call, over, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.nn.kernels.cuda.checks import check_contiguous, check_ids

EMBED = Path(__file__).with_name("embed.cu")
TILE = 1024  # rows that are counted together, as in embed.cu
SPAN = 32  # sorted rows that are added by one thread, as there
THREADS = 128


def embed(weight: DeviceArray, ids: DeviceArray) -> DeviceArray:
    """Return row `id` of the table for each id, NaN for ids outside."""
    y = arrays.empty((*ids.shape, weight.shape[1]), weight.dtype, "cuda")
    _embed((weight, ids), (y,))
    return y


def _pack_embed(weight: DeviceArray, ids: DeviceArray, y: DeviceArray) -> Call | None:
    check_ids(ids)
    check_contiguous("embed", weight, ids)
    vocab, dim = weight.shape
    numbers = np.int64(y.size), np.int64(dim), np.int64(vocab)
    width = vector_width(weight, y, divides=dim)
    return over(EMBED, "embed", y.size, numbers, T=weight.dtype, I=ids.dtype, V=width)


_embed = Packed(_pack_embed)


def embed_backward(dy: DeviceArray, ids: DeviceArray, grad: DeviceArray) -> None:
    """Add each row of dy to the row of grad that its id names; ids outside are left out.

    The rows of one id are added in their order, at first within spans of 32 rows in the order of their ids.
    """
    check_ids(ids)
    check_contiguous("embed_backward", dy, ids, grad)
    count, (vocab, dim) = ids.size, grad.shape
    if not dy.size:
        return
    width = vector_width(dy, grad, divides=dim)
    constants = {"T": dy.dtype, "I": ids.dtype, "V": width}
    order, keys, starts = _sorted(ids, count, vocab, constants)
    spans = -(-count // SPAN)
    parts = arrays.empty((2, spans, dim), grad.dtype, "cuda")
    work = spans * (dim // width)
    numbers = (np.int64(work), np.int32(count), np.int64(dim), np.int32(vocab))
    shape = (-(-work // THREADS),), (THREADS,)
    arrays.cuda_function(EMBED, "add_spans", **constants)(*shape, (dy, order, keys, grad, parts, *numbers))
    if spans > 1:
        arrays.cuda_function(EMBED, "join_spans", **constants)(*shape, (keys, starts, grad, parts, *numbers))


def _sorted(
    ids: DeviceArray, count: int, vocab: int, constants: dict[str, Any]
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return the rows in the order of their ids, equal ids in the order of rows; their ids; where each id starts."""
    tiles, groups = -(-count // TILE), -(-(vocab + 1) // TILE)
    tally = arrays.zeros((tiles, vocab + 1), np.dtype(np.int32), "cuda")
    totals, starts, order, keys = (
        arrays.empty((size,), np.dtype(np.int32), "cuda") for size in (groups, vocab + 1, count, count)
    )
    rows, table = (np.int32(count), np.int32(vocab)), (np.int32(tiles), np.int32(vocab))
    arrays.cuda_function(EMBED, "tally_ids", **constants)((tiles,), (TILE,), (ids, tally, *rows))
    arrays.cuda_function(EMBED, "total_tallies", **constants)((groups,), (TILE,), (tally, totals, *table))
    arrays.cuda_function(EMBED, "place_tallies", **constants)((groups,), (TILE,), (tally, totals, starts, *table))
    arrays.cuda_function(EMBED, "sort_rows", **constants)((tiles,), (TILE,), (ids, tally, order, keys, *rows))
    return order, keys, starts
