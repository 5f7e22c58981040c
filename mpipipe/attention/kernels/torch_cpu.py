"""Exact attention on the host by PyTorch's flash kernel for CPUs, on numpy arrays whose memory it shares.

The functions are those of `host`, with the same arguments, and the same results up to rounding. PyTorch's kernel knows
two masks and one head size, so some work stays with the host kernel: slices of kind BAND (windows, and causal slices
whose diagonal does not begin in the corner), and all slices where values have another head_dim than keys.

One call takes one slice of one batch entry, for as many key heads as make up some milliseconds of work; poll comes
after it. Query heads that share a key head see it through a stride of 0. How many threads PyTorch uses is up to the
caller (torch.set_num_threads): one, where there is a rank for each core.
"""

from __future__ import annotations

import numpy as np
import torch

from mpipipe.attention.kernels import host
from mpipipe.attention.kernels.half_precision import upcast_halves
from mpipipe.attention.mask import BAND, CAUSAL
from mpipipe.attention.merge import merge

COPY_ROWS = 1024  # of queries, from which on keys and values are first laid out head by head: they are read so often
PAIRS = 1 << 22  # of queries and keys in one call, where a single key head has no more
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@upcast_halves
def forward(q, k, v, scale, slices, out, lse, fresh, poll=host.nothing):
    """As host.forward."""
    ours, theirs = _divide(slices, k, v, scale)
    if theirs:
        host.forward(q, k, v, scale, theirs, out, lse, fresh, poll)
    for b, part, count, rows, keys, own, heads in _calls(q, k, ours):
        queries = _queries(q[b, rows, own], count)
        block = queries, _keys(k[b, keys, heads], queries), _keys(v[b, keys, heads], queries)
        found, found_lse = _show_nan(queries, *flash(*block, 0.0, part.kind == CAUSAL, scale=scale))
        place, lse_place = _grouped(out[b, rows, own], count), _grouped_rows(lse[b, own, rows], count)
        if fresh:
            place[...], lse_place[...] = found.numpy(), found_lse.numpy()
        else:
            merge(place, lse_place, found.numpy(), found_lse.numpy())
        poll()


@upcast_halves
def backward(dout, q, k, v, out, lse, scale, slices, dq, dk, dv, poll=host.nothing, fresh=False):
    """As host.backward."""
    if fresh:
        for gradient in (dq, dk, dv):
            gradient.fill(0)
    ours, theirs = _divide(slices, k, v, scale)
    if theirs:
        host.backward(dout, q, k, v, out, lse, scale, theirs, dq, dk, dv, poll)
    for b, part, count, rows, keys, own, heads in _calls(q, k, ours):
        queries = _queries(q[b, rows, own], count)
        block = queries, _keys(k[b, keys, heads], queries), _keys(v[b, keys, heads], queries)
        result = _queries(out[b, rows, own], count), _tensor(_grouped_rows(lse[b, own, rows], count))
        gradient = _queries(dout[b, rows, own], count)
        found = flash_backward(gradient, *block, *result, 0.0, part.kind == CAUSAL, scale=scale)
        place = _grouped(dq[b, rows, own], count)
        np.add(place, found[0].numpy(), out=place)
        for whole, repeated in zip((dk, dv), found[1:]):
            place = whole[b, keys, heads].transpose(1, 0, 2)
            np.add(place, repeated.sum(1).numpy(), out=place)
        poll()


def _show_nan(queries, found, found_lse):
    """PyTorch gives an output and log-sum-exp of 0 where all scores are NaN; make that NaN again."""
    if not found_lse.all():
        lost = (found_lse == 0) & ~torch.isfinite(queries).all(-1)
        found[lost], found_lse[lost] = torch.nan, torch.nan
    return found, found_lse


def _divide(slices, k, v, scale):
    """The slices that PyTorch can do, and the others; it masks before it scales, which needs a positive scale."""
    if k.shape[3] != v.shape[3] or not scale > 0:
        return [], slices
    return [part for part in slices if part.kind != BAND], [part for part in slices if part.kind == BAND]


def _calls(q, k, slices):
    """(batch entry, slice, number of key heads, then what to index with: rows, keys, query heads, key heads)."""
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    for part in slices:
        rows, keys = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
        pairs = group * (part.q_stop - part.q_start) * (part.k_stop - part.k_start)
        at_once = max(1, PAIRS // pairs)
        for b in range(q.shape[0]):
            for first in range(0, kv_heads, at_once):
                last = min(first + at_once, kv_heads)
                own = slice(first * group, last * group)
                yield b, part, last - first, rows, keys, own, slice(first, last)


def _grouped(x, count):
    """(rows, heads, dim) as (count, group, rows, dim), for `count` key heads; a view."""
    rows, heads, dim = x.shape
    return x.reshape(rows, count, heads // count, dim).transpose(1, 2, 0, 3)


def _grouped_rows(x, count):
    """(heads, rows) as (count, group, rows); a view."""
    heads, rows = x.shape
    return x.reshape(count, heads // count, rows)


def _queries(x, count):
    return _tensor(_grouped(x, count))


def _keys(x, queries):
    """(keys, count, dim) as a tensor (count, group, keys, dim) that fits the queries; no head is repeated in memory."""
    count, group, rows, _ = queries.shape
    keys = x.transpose(1, 0, 2)
    if rows >= COPY_ROWS:
        keys = np.ascontiguousarray(keys)
    return _tensor(keys)[:, None].expand(count, group, *keys.shape[1:])


def _tensor(x):
    """A tensor that shares the memory of x, or of a copy where x is read-only or backwards, as no tensor can be."""
    if not x.flags.writeable or x.strides[-1] != x.itemsize or min(x.strides) < 0:
        x = x.copy()
    return torch.from_numpy(x)
