"""The ranks of a ring agree on what they do: one small all-gather before each forward and each backward."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.attention import kernels
from mpipipe.attention.blocks import boundaries, check_window, rows_once
from mpipipe.attention.layout import KINDS, Layout
from mpipipe.attention.local import DTYPES, check_arrays
from mpipipe.attention.results import assign
from mpipipe.comm.alarm import wait
from mpipipe.comm.rotation import ROTATIONS
from mpipipe.comm.share import agree
from mpipipe.errors import ArgumentError, MismatchError

OPTIONS, FORWARD, BACKWARD = range(3)
CALLS = ("construction", "forward", "backward")
SHARED = ("batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "device", "options")  # same on every rank
DEVICES = ("cpu", "cuda")
BYTES = np.dtype(np.uint8)
NAMED = {"dtype": DTYPES, "device": DEVICES}
FACTS = len(SHARED) + 2  # and this rank's rows of queries and keys
KEPT_PLANS = 64


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
    def digest(self) -> int:
        return int.from_bytes(blake2b(repr(tuple(self)).encode(), digest_size=8).digest(), "big") >> 1


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

    def __init__(self, options: Options, rank: int, table, dtype):
        size = len(table)
        facts = dict(zip(SHARED, table[0].tolist()))
        self.batch, self.kv_heads, self.device = facts["batch"], facts["kv_heads"], DEVICES[facts["device"]]
        self.head_dim, self.value_dim, self.dtype = facts["head_dim"], facts["value_dim"], dtype
        self.sum_dtype = arrays.accumulator(dtype)
        rows, keys = (table[:, column].tolist() for column in (-2, -1))
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

    Here and below, `link` is the comm.rotation.Rotation of the ring.
    """
    error, facts = None, [0] * FACTS
    try:
        options = _checked(**given)
        facts[0] = options.digest
    except Exception as caught:
        error = caught
    table = _gather(link, OPTIONS, link.calls, facts, error)  # raises where any rank has an error
    if (table[:, 0] != table[0, 0]).any():
        everyone = agree(link.comm, None, options)
        for rank, other in enumerate(everyone):
            for name, found, expected in zip(Options._fields, other, everyone[0]):
                if found != expected:
                    _raise_alike(link, _difference(name, rank, repr(found), repr(expected)))
    return options


def agree_on_forward(link, options: Options, q, k, v) -> tuple[Work, int]:
    """Compare shapes and dtype over the ring; returns the work and the number of this call.

    Raises the same ArgumentError on every rank where they differ.
    """
    link.calls += 1
    error, facts = None, [0] * FACTS
    try:
        check_arrays(q, k, v)
        kernels.chosen(q, k, v)  # a rank without it must not leave the others waiting
        shapes = q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        kind = DTYPES.index(q.dtype), DEVICES.index(arrays.device_of(q))
        facts = [*shapes, *kind, options.digest, q.shape[1], k.shape[1]]
    except Exception as caught:
        error = caught
    table = _gather(link, FORWARD, link.calls, facts, error)
    key = table.tobytes()
    if key not in link.plans:
        if len(link.plans) == KEPT_PLANS:
            link.plans.clear()
        try:
            _check_shared(table)
            link.plans[key] = Work(options, link.comm.rank, table, q.dtype)
        except ArgumentError as found:  # every rank finds the same in the same table
            _raise_alike(link, found)
    return link.plans[key], link.calls


def agree_on_backward(link, call: int, dout, out):
    """Check that all ranks begin the backward of the same forward, with a fitting gradient; raises on all if not."""
    error = None
    if _facts(dout) != _facts(out):
        error = ArgumentError(
            "the gradient of the output does not fit the output", found=_facts(dout), expected=_facts(out)
        )
    _gather(link, BACKWARD, call, [0] * FACTS, error)


def _facts(x) -> str:
    return f"{x.dtype}{list(x.shape)} on {arrays.device_of(x)}" if arrays.is_array(x) else type(x).__name__


def _gather(link, kind, call, facts, error):
    """The facts of all ranks, (size, FACTS); raises on every rank where one has an error or does something else."""
    comm = link.comm
    mine = np.array([error is not None, kind, call, *facts], np.int64)
    table = np.zeros((comm.size, mine.size), np.int64)
    wait(comm.Iallgather(mine, table), "the ranks of a ring to agree")
    different = np.flatnonzero((table[:, 1:3] != table[0, 1:3]).any(1))
    if different.size:
        texts = [f"{CALLS[row[1]]} of call {row[2]}" for row in table.tolist()]
        problem = MismatchError(
            "the ranks of a ring do different things", rank=int(different[0]), found=texts[different[0]],
            expected=f"{texts[0]}, as on rank 0", remedy="make the same calls in the same order on all ranks",
        )
        _raise_alike(link, problem)
    if table[:, 0].any():
        agree(comm, error)
    return table[:, 3:]


def _raise_alike(link, problem):
    """Raise what every rank raises; only rank 0 reports it."""
    problem.echo = link.comm.rank != 0
    raise problem


def _checked(causal, layout, window, segments, scale, seq_len, rotation) -> Options:
    check_window(causal, window)
    for name, value, known in (("layout", layout, KINDS), ("rotation", rotation, ROTATIONS)):
        if value not in known:
            raise ArgumentError(f"unknown {name}", found=repr(value), expected=" or ".join(known))
    if segments is not None:
        segments = tuple(np.asarray(segments).tolist()) if np.ndim(segments) == 1 else segments
        if not isinstance(segments, tuple) or not all(isinstance(number, int) for number in segments):
            raise ArgumentError("segments", found=repr(segments)[:80], expected="one axis of integers")
    return Options(
        bool(causal), layout, None if window is None else int(window), segments,
        None if scale is None else float(scale), None if seq_len is None else int(seq_len), rotation,
    )


def _difference(name, rank, found, expected):
    expected = f"{expected[:200]}, as on rank 0"
    return MismatchError(f"the ranks of a ring differ in {name}", rank=rank, found=found[:200], expected=expected)


def _check_shared(table):
    for column, name in enumerate(SHARED):
        for rank, value in enumerate(table[:, column].tolist()):
            if value != table[0, column]:
                found, expected = str(value), str(table[0, column])
                if name in NAMED:
                    found, expected = str(NAMED[name][value]), str(NAMED[name][table[0, column]])
                raise _difference(name, rank, found, expected)


def _layout(kind, rows, name, seq_len=None) -> Layout:
    """The layout that these numbers of rows stand for."""
    layout = Layout(kind, len(rows), sum(rows))
    expected = [layout.length(rank) for rank in range(len(rows))]
    if rows != expected or seq_len not in (None, sum(rows)):
        total = sum(rows) if seq_len is None else seq_len
        wanted = Layout(kind, len(rows), total)
        raise ArgumentError(
            f"the shards of {name} do not cover the sequence",
            found=f"{rows} rows on the ranks", expected=f"{[wanted.length(r) for r in range(len(rows))]}, "
            f"the {kind} shards of {total} positions",
            remedy="cut the sequence with attention.Layout(...).shard",
        )
    return layout
