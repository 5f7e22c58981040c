"""Exact attention on the host by PyTorch's flash kernel for CPUs, on numpy arrays whose memory it shares.

PyTorch's kernel knows two masks and one head size, so some work stays with the host kernel: slices of kind BAND
(windows, and causal slices whose diagonal does not begin in the corner), and all slices if values have another head_dim
than keys.

One call takes one slice of one batch entry, for as many key heads as make up some milliseconds of work; then it polls.
Query heads that share a key head see it through a stride of 0. PyTorch uses as many threads as the rank, where this
number is known when this module is imported; it computes while the pool of the rank waits. Else the caller decides
(torch.set_num_threads): one, if there is a rank for each core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from mpipipe.arrays import share_threads
from mpipipe.attention.kernels import host
from mpipipe.attention.kernels.host import upcast_backward, upcast_forward
from mpipipe.attention.kernels.interface import Gradients, InPlaceAccumulator, KVBlock, OutLse, gradients_from_zeros
from mpipipe.attention.mask import BAND, CAUSAL, Slice
from mpipipe.attention.merge import merge

COPY_ROWS = 1024  # with more queries, keys and values are first laid out head by head, since they are read so often
PAIRS = 1 << 22  # of queries and keys in one call, unless a single key head has more
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
share_threads()


@upcast_forward
def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`."""
    (q, k, v), (out, lse) = (block.q, block.k, block.v), result
    ours, theirs = _divide(block)
    if theirs:
        host.forward(replace(block, slices=theirs), result, overwrite)
    for of_q, of_k, of_lse, groups, causal in _calls(q, k, ours):
        queries = _queries(q[of_q], groups)
        operands = queries, _keys(k[of_k], queries), _keys(v[of_k], queries)
        found, found_lse = _show_nan(queries, *flash(*operands, 0.0, causal, scale=block.scale))
        place, lse_place = _grouped(out[of_q], groups), _grouped_rows(lse[of_lse], groups)
        if overwrite:
            place[...], lse_place[...] = found.numpy(), found_lse.numpy()
        else:
            merge(place, lse_place, found.numpy(), found_lse.numpy())
        block.poll()


@upcast_backward
def backward(block: KVBlock, dout: np.ndarray, result: OutLse, gradients: Gradients) -> None:
    """As `AttentionKernel.backward`."""
    (q, k, v), (out, lse), (dq, dk, dv) = (block.q, block.k, block.v), result, gradients
    ours, theirs = _divide(block)
    if theirs:
        host.backward(replace(block, slices=theirs), dout, result, gradients)
    for of_q, of_k, of_lse, groups, causal in _calls(q, k, ours):
        queries, slope = _queries(q[of_q], groups), _queries(dout[of_q], groups)
        operands = queries, _keys(k[of_k], queries), _keys(v[of_k], queries)
        given = _queries(out[of_q], groups), _tensor(_grouped_rows(lse[of_lse], groups))
        found = flash_backward(slope, *operands, *given, 0.0, causal, scale=block.scale)
        place = _grouped(dq[of_q], groups)
        np.add(place, found[0].numpy(), out=place)
        for whole, repeated in zip((dk, dv), found[1:]):
            place = whole[of_k].transpose(1, 0, 2)
            np.add(place, repeated.sum(1).numpy(), out=place)
        block.poll()


make_accumulator, block_gradients = partial(InPlaceAccumulator, forward), partial(gradients_from_zeros, backward)


def _show_nan(queries: torch.Tensor, found: torch.Tensor, found_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make NaN again what PyTorch gives as 0: output and log-sum-exp of rows whose scores are all NaN."""
    if not found_lse.all():
        lost = (found_lse == 0) & ~torch.isfinite(queries).all(-1)
        found[lost], found_lse[lost] = torch.nan, torch.nan
    return found, found_lse


def _divide(block: KVBlock) -> tuple[Sequence[Slice], Sequence[Slice]]:
    """The slices that PyTorch can do, and the others. It masks before it scales, which needs a positive scale."""
    slices = block.slices
    if block.k.shape[3] != block.v.shape[3] or not block.scale > 0:
        return [], slices
    return [part for part in slices if part.kind != BAND], [part for part in slices if part.kind == BAND]


class _FlashCall(NamedTuple):
    """One call of PyTorch's kernel: what to index with, and how many groups of query heads it takes."""

    of_q: tuple[int, slice, slice]
    of_k: tuple[int, slice, slice]
    of_lse: tuple[int, slice, slice]
    groups: int
    causal: bool


def _calls(q: np.ndarray, k: np.ndarray, slices: Sequence[Slice]) -> Iterator[_FlashCall]:
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    for part in slices:
        rows, keys = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
        pairs = group * (part.q_stop - part.q_start) * (part.k_stop - part.k_start)
        at_once = max(1, PAIRS // pairs)
        for b in range(q.shape[0]):
            for first in range(0, kv_heads, at_once):
                last = min(first + at_once, kv_heads)
                heads, causal = slice(first * group, last * group), part.kind == CAUSAL
                kv = slice(first, last)
                yield _FlashCall((b, rows, heads), (b, keys, kv), (b, heads, rows), last - first, causal)


def _grouped(x: np.ndarray, count: int) -> np.ndarray:
    """(rows, heads, dim) as (count, group, rows, dim), for `count` key heads; a view."""
    rows, heads, dim = x.shape
    return x.reshape(rows, count, heads // count, dim).transpose(1, 2, 0, 3)


def _grouped_rows(x: np.ndarray, count: int) -> np.ndarray:
    """(heads, rows) as (count, group, rows); a view."""
    heads, rows = x.shape
    return x.reshape(count, heads // count, rows)


def _queries(x: np.ndarray, count: int) -> torch.Tensor:
    return _tensor(_grouped(x, count))


def _keys(x: np.ndarray, queries: torch.Tensor) -> torch.Tensor:
    """(keys, count, dim) as a tensor (count, group, keys, dim) that fits the queries; no head is repeated in memory."""
    count, group, rows, _ = queries.shape
    keys = x.transpose(1, 0, 2)
    if rows >= COPY_ROWS:
        keys = np.ascontiguousarray(keys)
    return _tensor(keys)[:, None].expand(count, group, *keys.shape[1:])


def _tensor(x: np.ndarray) -> torch.Tensor:
    """A tensor that shares the memory of x; of a copy if x is read-only or backwards, as no tensor can be."""
    if not x.flags.writeable or x.strides[-1] != x.itemsize or min(x.strides) < 0:
        x = x.copy()
    return torch.from_numpy(x)
