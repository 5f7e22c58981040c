"""Who holds which positions of a sequence that is spread over the ranks of a ring.

    8 positions, 2 ranks       rank 0        rank 1
    contiguous                 0 1 2 3       4 5 6 7
    zigzag                     0 1 6 7       2 3 4 5        first and last of 2N chunks, and so on inwards
    striped                    0 2 4 6       1 3 5 7

Under a causal mask later positions have more to do. Contiguous shards are uneven then, zigzag shards exactly even
where 2N divides the length, striped shards nearly even. Any length goes, also one shorter than the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from mpipipe.attention.mask import Run, Slice, plan
from mpipipe.errors import ArgumentError

KINDS = ("contiguous", "zigzag", "striped")


class Layout:
    """The shards of a sequence.

    Parameters
    ----------
    kind : "contiguous", "zigzag" or "striped"
    ranks : size of the ring, N
    seq_len : length of the whole sequence

    Raises ArgumentError for an unknown kind, and for sizes below 1 rank or 0 positions.
    """

    def __init__(self, kind: str, ranks: int, seq_len: int):
        if kind not in KINDS:
            raise ArgumentError("unknown layout", found=repr(kind), expected=" or ".join(KINDS))
        for name, value, least in (("ranks", ranks, 1), ("seq_len", seq_len, 0)):
            if not isinstance(value, (int, np.integer)) or value < least:
                raise ArgumentError(f"layout: {name}", found=repr(value), expected=f"an integer of at least {least}")
        self.kind, self.ranks, self.seq_len = kind, int(ranks), int(seq_len)

    @cached_property
    def runs(self) -> list[list[Run]]:
        """For each rank the runs of positions that it holds, in the order of its rows."""
        ranks = range(self.ranks)
        if self.kind == "striped":
            counts = [len(range(rank, self.seq_len, self.ranks)) for rank in ranks]
            return [[Run(0, count, rank, self.ranks)] for rank, count in zip(ranks, counts)]
        chunks = self.ranks if self.kind == "contiguous" else 2 * self.ranks
        size, bigger = divmod(self.seq_len, chunks)
        starts = [chunk * size + min(chunk, bigger) for chunk in range(chunks + 1)]
        if self.kind == "contiguous":
            return [[Run(0, starts[rank + 1] - starts[rank], starts[rank], 1)] for rank in ranks]
        shards = []
        for rank in ranks:
            low, high = rank, chunks - 1 - rank
            first = Run(0, starts[low + 1] - starts[low], starts[low], 1)
            shards.append([first, Run(first.rows, starts[high + 1] - starts[high], starts[high], 1)])
        return shards

    def length(self, rank: int) -> int:
        """Number of positions that `rank` holds."""
        return sum(run.rows for run in self.runs[rank])

    def positions(self, rank: int) -> np.ndarray:
        """The position of each of its rows in the whole sequence, int64."""
        runs = [run.first + run.stride * np.arange(run.rows) for run in self.runs[rank]]
        return np.concatenate(runs).astype(np.int64)

    def shard(self, array: np.ndarray, rank: int, axis: int = 1) -> np.ndarray:
        """The rows of a whole array (seq_len along `axis`) that `rank` holds; a C-contiguous copy."""
        if array.shape[axis] != self.seq_len:
            raise ArgumentError(
                "the array to shard has another length",
                found=f"{array.shape[axis]} along axis {axis}",
                expected=f"seq_len {self.seq_len}",
            )
        return np.ascontiguousarray(array.take(self.positions(rank), axis=axis))

    def unshard(self, arrays: Sequence[np.ndarray], axis: int = 1) -> np.ndarray:
        """The whole array from the shards of all ranks, in rank order."""
        found = [array.shape[axis] for array in arrays]
        expected = [self.length(rank) for rank in range(self.ranks)]
        if found != expected:
            raise ArgumentError("the shards have other lengths than the layout", found=found, expected=expected)
        order = np.argsort(np.concatenate([self.positions(rank) for rank in range(self.ranks)]))
        return np.concatenate(arrays, axis=axis).take(order, axis=axis)

    def needs(
        self,
        q_rank: int,
        k_rank: int,
        causal: bool = True,
        window: int | None = None,
        documents: Sequence[int] | None = None,
        keys: Layout | None = None,
    ) -> list[Slice]:
        """What queries of `q_rank` need of the keys of `k_rank`; empty where they see nothing of it.

        `keys` is the layout of the keys where they are another sequence; for the rest see `blocks.plan`.
        """
        if causal and window is None and documents is None and q_rank == k_rank and keys is None:
            rows = self.length(q_rank)  # stand in the order of their positions, so causality is that of the rows
            return [Slice(0, rows, 0, rows, None, 0 if rows > 1 else None)] if rows else []
        return plan(self.runs[q_rank], (keys or self).runs[k_rank], causal, window, documents)

    def steps(self, causal: bool, window: int | None = None, documents=None, keys: Layout | None = None) -> int:
        """Ring steps that some rank needs: the keys of rank r - t are at rank r in step t = 0 ... steps - 1."""
        for step in range(self.ranks - 1, 0, -1):
            for rank in range(self.ranks):
                if self.needs(rank, (rank - step) % self.ranks, causal, window, documents, keys):
                    return step + 1
        return 1
