"""The ranks of a ring agree on what they do: one small all-gather before each forward and each backward."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.attention import kernels
from mpipipe.attention.accumulate import assign
from mpipipe.attention.layout import KINDS, Layout
from mpipipe.attention.local import check_arrays
from mpipipe.attention.mask import boundaries, check_scale, check_window, rows_once
from mpipipe.comm.consensus import Ballot, raise_on_all
from mpipipe.comm.ring_exchange import ROTATIONS
from mpipipe.errors import ArgumentError

BYTES = np.dtype(np.uint8)
KEPT_PLANS = 64
REMEDY = "give the same options and arrays of the same kind on all ranks, and make the same calls in the same order"


class Options(NamedTuple):
    """What a ring is asked for, in plain types, so that equal requests are equal."""

    causal: bool
    layout: str
    window: int | None
    segments: tuple[int, ...] | None
    scale: float | None
    seq_len: int | None
    rotation: str

    @property
    def facts(self) -> tuple:
        """What all ranks of a ring must have in common."""
        return tuple(zip(self._fields, self))

    @property
    def digest(self) -> str:
        """A short text, the same for equal options; segments can be long."""
        return blake2b(repr(tuple(self)).encode(), digest_size=8).hexdigest()


class Shared(NamedTuple):
    """What the arrays of all ranks of a ring have in common."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str


class Work:
    """What this rank does in a forward or backward, and how blocks of keys and values are packed.

    Attributes
    ----------
    steps : ring steps
    slices : for each ring step t, what this rank's queries need of the keys of rank r - t
    fresh : whether the first step sets each row of the result in one slice
    device : "cpu" or "cuda"
    dtype, sum_dtype : of keys and values, and of their gradients, which travel as sums

    A message is an array of bytes: the gradients of a block of keys and of values, then the keys and values of a block,
    one array behind the other, all C-contiguous; either half may be missing.
    """

    def __init__(self, options: Options, rank: int, shared: Shared, rows: list[int], keys: list[int], dtype):
        size = len(rows)
        self.batch, self.kv_heads, self.device = shared.batch, shared.kv_heads, shared.device
        self.head_dim, self.value_dim, self.dtype = shared.head_dim, shared.value_dim, dtype
        self.sum_dtype = arrays.accumulator(dtype)
        self.lengths = keys
        queries = _layout(options.layout, rows, "queries", options.seq_len)
        others = queries if keys == rows else _layout(options.layout, keys, "keys")
        documents = boundaries(options.segments, queries.seq_len)
        if documents is not None and others is not queries:
            raise ArgumentError("segments need queries and keys of one sequence", found=f"rows {rows}, keys {keys}")
        view = options.causal, options.window, documents, None if others is queries else others
        self.steps = queries.steps(*view)
        self.slices = [queries.needs(rank, (rank - step) % size, *view) for step in range(self.steps)]
        self.fresh = rows_once(self.slices[0], rows[rank])

    def kv_bytes(self, block: int) -> int:
        """Bytes of the keys and values of a rank (modulo the ring)."""
        return self._size(block) * self.dtype.itemsize

    def gradient_bytes(self, block: int) -> int:
        """Bytes of their gradients."""
        return self._size(block) * self.sum_dtype.itemsize

    def empty(self, nbytes: int):
        """A buffer of bytes."""
        return arrays.empty(nbytes, BYTES, self.device)

    def unpack(self, message, block: int):
        """Views (k, v) of a buffer that begins with the keys and values of a rank."""
        return self._views(message[: self.kv_bytes(block)].view(self.dtype), block)

    def unpack_gradients(self, message, block: int):
        """Views (dk, dv) of a buffer that begins with the gradients of the keys and values of a rank."""
        return self._views(message[: self.gradient_bytes(block)].view(self.sum_dtype), block)

    def pack(self, k, v, block: int):
        """A new buffer with k and v, one behind the other."""
        message = self.empty(self.kv_bytes(block))
        for place, x in zip(self.unpack(message, block), (k, v)):
            assign(place, x)
        return message

    def _size(self, block):
        """Elements of the keys and values of a rank."""
        return self.batch * self._rows(block) * self.kv_heads * (self.head_dim + self.value_dim)

    def _rows(self, block):
        return self.lengths[block % len(self.lengths)]

    def _views(self, flat, block):
        shape = self.batch, self._rows(block), self.kv_heads
        middle = self.batch * self._rows(block) * self.kv_heads * self.head_dim
        return flat[:middle].reshape(*shape, self.head_dim), flat[middle:].reshape(*shape, self.value_dim)


def agree_on_options(link, given: dict) -> Options:
    """Check the options of a ring, and that all ranks have the same; raises the same ArgumentError on all of them.

    Here and below, `link` is the comm.ring_exchange.RingExchange of the ring.
    """
    error, facts, options = None, (), None
    try:
        options = _checked(**given)
        facts = options.facts
    except Exception as caught:
        error = caught
    link.group.agree("construction of a Ring", facts, error=error, remedy=REMEDY)
    return options


def agree_on_forward(link, options: Options, digest: str, q, k, v) -> tuple[Work, int]:
    """Compare shapes and dtype over the ring; returns the work and the number of this call.

    `digest` is that of the options. Raises the same ArgumentError on every rank where they differ.
    """
    link.calls += 1
    error, facts, lengths = None, (), (0, 0)
    try:
        check_arrays(q, k, v)
        kernels.chosen(q, k, v)  # a rank without it must not leave the others waiting
        shapes = q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        shared = Shared(*shapes, q.dtype.name, arrays.device_of(q))
        facts, lengths = (*zip(Shared._fields, shared), ("options", digest)), (q.shape[1], k.shape[1])
    except Exception as caught:
        error = caught
    ballot = Ballot("forward", facts, error, None, REMEDY, link.calls, " of a ring")
    rows, keys = ballot.cast(link.group, lengths).T.tolist()
    if not ballot.failed:
        key = shared, options, tuple(rows), tuple(keys)
        if key not in link.plans:
            if len(link.plans) == KEPT_PLANS:
                link.plans.clear()
            try:
                link.plans[key] = Work(options, link.group.rank, shared, rows, keys, q.dtype)
            except ArgumentError as found:  # every rank finds the same in the same table
                raise_on_all(0, found, link.group)
    ballot.decide()
    return link.plans[key], link.calls


def agree_on_backward(link, call: int, dout, out):
    """Check that all ranks begin the backward of the same forward, with a fitting gradient; raises on all if not."""
    error = None
    if _facts(dout) != _facts(out):
        error = ArgumentError(
            "the gradient of the output does not fit the output", found=_facts(dout), expected=_facts(out)
        )
    ballot = Ballot("backward", (), error, None, REMEDY, call, " of a ring")
    ballot.cast(link.group)
    ballot.decide()


def _facts(x) -> str:
    return f"{x.dtype}{list(x.shape)} on {arrays.device_of(x)}" if arrays.is_array(x) else type(x).__name__


def _checked(causal, layout, window, segments, scale, seq_len, rotation) -> Options:
    check_window(causal, window)
    check_scale(scale)
    for name, value, known in (("layout", layout, KINDS), ("rotation", rotation, ROTATIONS)):
        if value not in known:
            raise ArgumentError(f"unknown {name}", found=repr(value), expected=" or ".join(known))
    if segments is not None:
        segments = tuple(np.asarray(segments).tolist()) if np.ndim(segments) == 1 else segments
        if not isinstance(segments, tuple) or not all(isinstance(number, int) for number in segments):
            raise ArgumentError("segments", found=repr(segments)[:80], expected="one axis of integers")
    return Options(
        bool(causal),
        layout,
        None if window is None else int(window),
        segments,
        None if scale is None else float(scale),
        None if seq_len is None else int(seq_len),
        rotation,
    )


def _layout(kind, rows, name, seq_len=None) -> Layout:
    """The layout that these numbers of rows stand for."""
    layout = Layout(kind, len(rows), sum(rows))
    expected = [layout.length(rank) for rank in range(len(rows))]
    if rows != expected or seq_len not in (None, sum(rows)):
        total = sum(rows) if seq_len is None else seq_len
        wanted = Layout(kind, len(rows), total)
        raise ArgumentError(
            f"the shards of {name} do not cover the sequence",
            found=f"{rows} rows on the ranks",
            expected=f"{[wanted.length(r) for r in range(len(rows))]}, the {kind} shards of {total} positions",
            remedy="cut the sequence with attention.Layout(...).shard",
        )
    return layout
