"""The ranks of a ring agree on what they attend to: one small all-gather before each forward."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mpipipe.arrays import aligned_empty
from mpipipe.attention import kernels
from mpipipe.attention.blocks import boundaries
from mpipipe.attention.layout import Layout
from mpipipe.attention.local import check_arrays
from mpipipe.comm.alarm import wait
from mpipipe.comm.share import agree
from mpipipe.errors import ArgumentError, MismatchError

SHARED = ("batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "options")  # the same on every rank
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


class Work:
    """What this rank does in a forward or backward, and how blocks of keys and values are packed.

    Attributes
    ----------
    steps : ring steps
    slices : for each ring step t, what this rank's queries need of the keys of rank r - t
    fresh : whether the first step sets each row of the result in one slice
    """

    def __init__(self, ring, table, dtype):
        rank, size = ring.comm.rank, ring.comm.size
        facts = dict(zip(SHARED, table[0, 1:].tolist()))
        self.batch, self.kv_heads = facts["batch"], facts["kv_heads"]
        self.head_dim, self.value_dim, self.dtype = facts["head_dim"], facts["value_dim"], dtype
        rows, keys = (table[:, column].tolist() for column in (-2, -1))
        self.lengths = keys
        queries = _layout(ring, rows, "queries", ring.seq_len)
        others = queries if keys == rows else _layout(ring, keys, "keys")
        documents = boundaries(ring.segments, queries.seq_len)
        if documents is not None and others is not queries:
            raise ArgumentError("segments need queries and keys of one sequence", found=f"rows {rows}, keys {keys}")
        view = ring.causal, ring.window, documents, None if others is queries else others
        self.steps = queries.steps(*view)
        self.slices = [queries.needs(rank, (rank - step) % size, *view) for step in range(self.steps)]
        first = self.slices[0]
        self.fresh = len(first) == 1 and first[0].q_stop - first[0].q_start == rows[rank]

    def size(self, block: int) -> int:
        """Elements of the packed keys and values of a rank (modulo the ring)."""
        rows = self.lengths[block % len(self.lengths)]
        return self.batch * rows * self.kv_heads * (self.head_dim + self.value_dim)

    def empty(self, block: int):
        """A buffer for the packed keys and values of a rank."""
        return aligned_empty(self.size(block), self.dtype)

    def unpack(self, flat, block: int):
        """Views (k, v) of the front of a buffer."""
        rows = self.lengths[block % len(self.lengths)]
        shape = self.batch, rows, self.kv_heads
        middle = self.batch * rows * self.kv_heads * self.head_dim
        keys = flat[:middle].reshape(*shape, self.head_dim)
        return keys, flat[middle : self.size(block)].reshape(*shape, self.value_dim)

    def pack(self, k, v, block: int):
        """A new buffer with k and v, one behind the other."""
        flat = self.empty(block)
        keys, values = self.unpack(flat, block)
        keys[...], values[...] = k, v
        return flat


def agree_on_work(ring, q, k, v) -> Work:
    """Compare shapes, dtype and options over the ring. Raises the same ArgumentError on all ranks where they differ."""
    error = None
    facts = np.zeros(1 + len(SHARED) + 2, np.int64)
    try:
        kernels.chosen()  # a rank without it must not leave the others waiting
        check_arrays(q, k, v)
        if q.dtype not in DTYPES:
            raise ArgumentError("the dtype of attention on the host", found=str(q.dtype), expected="float32 or float64")
        shapes = q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        facts[1:] = (*shapes, DTYPES.index(q.dtype), _options(ring), q.shape[1], k.shape[1])
    except Exception as caught:
        error = caught
        facts[0] = 1
    table = np.zeros((ring.comm.size, facts.size), np.int64)
    wait(ring.comm.Iallgather(facts, table))
    if table[:, 0].any():
        agree(ring.comm, error)
    key = table.tobytes()
    if key not in ring.known:
        try:
            _check_shared(table)
            ring.known[key] = Work(ring, table, q.dtype)
        except ArgumentError as found:  # every rank finds the same in the same table
            found.echo = ring.comm.rank != 0
            raise
    return ring.known[key]


def _options(ring) -> int:
    content = repr((ring.causal, ring.layout, ring.window, ring.scale, ring.seq_len, ring.rotation.mode))
    segments = b"" if ring.segments is None else ring.segments.astype(np.int64).tobytes()
    return int.from_bytes(blake2b(content.encode() + segments, digest_size=8).digest(), "big") >> 1


def _check_shared(table):
    for column, name in enumerate(SHARED, start=1):
        for rank, value in enumerate(table[:, column].tolist()):
            if value != table[0, column]:
                found, expected = str(value), str(table[0, column])
                if name == "dtype":
                    found, expected = str(DTYPES[value]), str(DTYPES[table[0, column]])
                elif name == "options":
                    found, expected = f"digest {found}", f"{expected} (of causal, layout, window, segments, ...)"
                raise MismatchError(
                    f"the ranks of a ring differ in {name}",
                    rank=rank,
                    found=found,
                    expected=f"{expected}, as on rank 0",
                )


def _layout(ring, rows, name, seq_len=None) -> Layout:
    """The layout that these numbers of rows stand for."""
    layout = Layout(ring.layout, len(rows), sum(rows))
    expected = [layout.length(rank) for rank in range(len(rows))]
    if rows != expected or seq_len not in (None, sum(rows)):
        total = sum(rows) if seq_len is None else seq_len
        wanted = Layout(ring.layout, len(rows), total)
        raise ArgumentError(
            f"the shards of {name} do not cover the sequence",
            found=f"{rows} rows on the ranks", expected=f"{[wanted.length(r) for r in range(len(rows))]}, "
            f"the {ring.layout} shards of {total} positions",
            remedy="cut the sequence with attention.Layout(...).shard",
        )
    return layout
