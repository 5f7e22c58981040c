"""Keys and values of all positions so far, for one layer of a model that decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpipipe.arrays import Array, accumulator, aligned_empty
from mpipipe.attention import kernels, mask
from mpipipe.attention.decode import CacheOptions, agree_on_facts, merged_over_ranks, nothing_yet, sharing_group
from mpipipe.attention.kernels import KVBlock, OutLse, no_poll
from mpipipe.attention.mask import PositionRange, Slice
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator
from mpipipe.nn import Attend


class _CausalCache(Attend):
    """Causal attention over keys and values that the ranks of a communicator share. There is no backward."""

    def __init__(self, comm: Communicator | None, options: CacheOptions) -> None:
        options.check()
        self.options = options
        self.group = sharing_group(comm)
        self.size, self.rank = (1, 0) if self.group is None else (self.group.size, self.group.rank)
        self.poll: Callable[[], object] = no_poll
        self._kept: list[np.ndarray] = []  # keys and values, once their shapes are known

    def backward(self, dout: Array, saved: None) -> NoReturn:
        raise ArgumentError(
            "a cache of keys and values has no backward",
            expected="a model that only runs forward",
            remedy="train with attention.Local or attention.Ring",
        )


class KVCache(_CausalCache):
    """Causal attention that keeps the keys and values of all positions so far, in one layer of a model that decodes.

    Rank r of N keeps positions r c ... (r + 1) c - 1 with c = ceil(capacity / N), so a prompt that fills most of the
    capacity is spread evenly. There is no backward. A cache holds one sequence of positions at a time, on the host.

    Parameters
    ----------
    capacity : int
        Number of positions that there may be in all.
    comm : mpi4py.MPI.Comm, optional
        Ranks that share the cache. Each brings the same queries, keys and values, and gets the same result. The
        constructor and `forward` are collective over it. None: this rank alone.
    window, scale : int and float, optional
        As for `Local`.

    Attributes
    ----------
    length : int
        Positions so far.
    first, stop : int
        This rank keeps positions first ... stop - 1.
    poll : callable
        Called after each tile.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.attention import KVCache, Local
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 6, 2, 8))
    >>> cache = KVCache(capacity=10)
    >>> prompt, _ = cache.forward(q[:, :5], k[:, :5], v[:, :5])
    >>> new, _ = cache.forward(q[:, 5:], k[:, 5:], v[:, 5:])
    >>> cache.length
    6
    >>> bool(np.allclose(new, Local(causal=True).forward(q, k, v)[0][:, 5:]))
    True
    """

    def __init__(
        self, capacity: int, comm: Communicator | None = None, window: int | None = None, scale: float | None = None
    ) -> None:
        if not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ArgumentError(
                "capacity of a cache", found=repr(capacity), expected="an integer of at least 1, the positions in all"
            )
        super().__init__(comm, CacheOptions(window, scale))
        self.capacity = int(capacity)
        part = -(-self.capacity // self.size)
        self.first, self.stop = (min(r * part, self.capacity) for r in (self.rank, self.rank + 1))
        self.length = 0

    def clear(self) -> None:
        """Drop all positions."""
        self.length = 0
        self._kept = []

    def positions(self, rows: int) -> np.ndarray:
        return np.arange(self.length, self.length + rows)

    def advance(self, rows: int) -> None:
        self._check_room(rows)
        self.length += rows

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, None]:
        """Append the keys and values of p new positions, and attend to all positions so far; collective.

        Parameters
        ----------
        q, k, v : numpy.ndarray
            (batch, p, heads, head_dim), (batch, p, kv_heads, head_dim) and (batch, p, kv_heads, value_dim), the same on
            every rank.

        Returns
        -------
        out : numpy.ndarray
            (batch, p, heads, value_dim), with the same bits on every rank.
        saved : None

        Raises
        ------
        ArgumentError, MismatchError
            If arrays do not fit together or to the cache, exceed its capacity, or differ in shape between ranks.
            Nothing is appended then.
        """
        kernel = agree_on_facts(self.group, lambda: self._facts(q, k, v))
        start, end = self.length, self.length + k.shape[1]
        keys, values = self._append(k, v, end)
        out = self.options.attend(self.group, kernel, (q, keys, values), start, self.first, self.poll)
        self.length = end
        return out, None

    def _facts(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Any]:
        facts = self.options.facts(q, k, v, self.length)
        if q.shape[1] != k.shape[1]:
            raise ArgumentError(
                "a cache takes queries, keys and values of the same new positions",
                found=f"{q.shape[1]} queries, {k.shape[1]} keys",
                expected="as many keys as queries",
            )
        self._check_room(k.shape[1])
        for name, x, kept in zip("kv", (k, v), self._kept):
            wanted = kept.shape[0], k.shape[1], kept.shape[2], kept.shape[3]
            if x.shape != wanted or x.dtype != kept.dtype:
                raise ArgumentError(
                    f"{name} does not fit to what is in the cache",
                    found=f"{x.shape} {x.dtype}",
                    expected=f"{wanted} {kept.dtype}",
                    remedy="clear() the cache before a text of another kind",
                )
        return facts | {"capacity": self.capacity}

    def _check_room(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            raise ArgumentError(
                "the capacity of the cache is exceeded",
                found=f"{self.length} positions and {rows} more",
                expected=f"{self.capacity} in all",
                remedy="make the cache with a larger capacity, or clear() it before a new text",
            )

    def _append(self, k: np.ndarray, v: np.ndarray, end: int) -> list[np.ndarray]:
        """Keep this rank's part of positions length ... end - 1; returns views of all that it has."""
        if not self._kept:  # the rows of one head lie together: kernels need no copy
            places = [(len(x), x.shape[2], self.stop - self.first, x.shape[3]) for x in (k, v)]
            self._kept = [aligned_empty(place, k.dtype).swapaxes(1, 2) for place in places]
        low, high = max(self.length, self.first), min(end, self.stop)
        if low < high:
            for kept, x in zip(self._kept, (k, v)):
                kept[:, low - self.first : high - self.first] = x[:, low - self.length : high - self.length]
        filled = max(0, high - self.first)
        return [kept[:, :filled] for kept in self._kept]


Cached = KVCache  # an older name


# -- Keys and values of several sequences at once, for one layer of a model that decodes a batch of any lengths -------
#
# Tokens of all sequences stand one after the other in a micro-batch (1, tokens); pieces say whose they are. A sequence
# has a slot in the cache:
#
#     micro-batch   | piece of slot 2: 5 tokens from position 0 | slot 0: 1 token at 31 | slot 1: 1 token at 7 |
#
#     keys here       slot 0  ################................      filled up to position 31
#                     slot 1  ####............................      up to 7
#                     slot 2  ###.............................      up to 4
#
# Each query sees its own slot alone. So the result for a sequence does not depend on the others. The
# positions of each slot are spread over the ranks that share the cache, as those of a KVCache are.


class Piece(NamedTuple):
    """Consecutive tokens of one sequence in a micro-batch.

    `slot` is the place of the sequence in the caches.
    """

    slot: int
    start: int  # position of the first token
    rows: int
    total: int  # positions that the sequence may come to have, which decides what each rank keeps of it
    ends: bool = True  # whether the logits after the last token are wanted


class Pieces:
    """The pieces of the current micro-batch: set by the loop that runs the layers, read by the caches of all layers."""

    def __init__(self) -> None:
        self.now: Sequence[Piece] = ()
        self.positions = np.zeros(0, np.int64)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Let the next forward of each cache take these pieces."""
        self.now = pieces
        self.positions = np.concatenate([np.arange(piece.start, piece.start + piece.rows) for piece in pieces])


class SlotCache(_CausalCache):
    """Causal attention that keeps keys and values of the sequences in its slots. There is no backward.

    pieces : what the next micro-batch consists of
    slots : number of sequences at once
    capacity : largest `total` of a piece
    comm, window, scale : as for `KVCache`
    """

    def __init__(
        self,
        pieces: Pieces,
        slots: int,
        capacity: int,
        comm: Communicator | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(comm, CacheOptions(window, scale))
        self.pieces, self.slots, self.capacity = pieces, slots, capacity
        self.rows = -(-capacity // self.size)  # of a slot here

    def positions(self, rows: int) -> np.ndarray:
        return self.pieces.positions

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, None]:
        """Append the keys and values of the pieces, and attend to what their slots hold; collective.

        q, k, v : (1, tokens, heads or kv_heads, dim), the same on every rank. Returns (1, tokens, heads, value_dim),
        with the same bits on every rank.
        """
        pieces = self.pieces.now
        tokens = sum(piece.rows for piece in pieces)
        if q.shape[:2] != (1, tokens) or k.shape[:2] != (1, tokens):
            raise ArgumentError(
                "the micro-batch is not what its pieces say",
                found=f"queries {q.shape}, keys {k.shape}",
                expected=f"(1, {tokens}, heads, head_dim)",
            )
        if not self._kept:
            # (kv_heads, slots, rows, dim) of zeros: pages that no sequence reaches are never touched
            self._kept = [np.zeros((x.shape[2], self.slots, self.rows, x.shape[3]), x.dtype) for x in (k, v)]
        window, scale = self.options
        scale = q.shape[3] ** -0.5 if scale is None else scale

        def attend(result: OutLse) -> None:
            nothing_yet(result)
            slices: list[Slice] = []
            row = 0
            for piece in pieces:
                first, filled = self._append(piece, row, k, v)
                if piece.rows == 1:
                    low = 0 if window is None else max(0, piece.start + 1 - window - first)
                    if low < filled:
                        keys, values = (kept[:, piece.slot, low:filled] for kept in self._kept)
                        result.out[0, row], result.lse[0, :, row] = _attend_one(q[0, row], keys, values, scale)
                else:
                    queries = PositionRange(row, piece.rows, piece.start, 1)
                    held = PositionRange(piece.slot * self.rows, filled, first, 1)
                    slices += mask.mask_slices([queries], [held], True, window)
                row += piece.rows
            if slices:  # the slots side by side are one long sequence (1, slots x rows, kv_heads, dim), a view
                k_long, v_long = (x.reshape(len(x), -1, x.shape[3]).swapaxes(0, 1)[None] for x in self._kept)
                block = KVBlock(q, k_long, v_long, scale, slices, self.poll)
                kernels.chosen().forward(block, result, overwrite=False)
            self.poll()

        return merged_over_ranks(self.group, q, v.shape[3], attend), None

    def _append(self, piece: Piece, row: int, k: np.ndarray, v: np.ndarray) -> tuple[int, int]:
        """Keep this rank's part of a piece; return its first position of the slot, and how many it has from there."""
        part = -(-piece.total // self.size)
        first, stop = (min(rank * part, piece.total) for rank in (self.rank, self.rank + 1))
        end = piece.start + piece.rows
        if not 0 <= piece.slot < self.slots or end > piece.total or piece.total > self.capacity:
            raise ArgumentError(
                "a piece does not fit into the cache",
                found=str(piece),
                expected=f"a slot below {self.slots}, and at most {self.capacity} positions in all",
            )
        low, high = max(piece.start, first), min(end, stop)
        if low < high:
            for kept, x in zip(self._kept, (k, v)):
                new = x[0, row + low - piece.start : row + high - piece.start]
                kept[:, piece.slot, low - first : high - first] = new.swapaxes(0, 1)
        return first, max(0, high - first)


def _attend_one(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a single query (heads, dim) over keys (kv_heads, keys, dim), for all heads at once.

    The kernels go head by head, in tiles made for many queries.
    """
    heads, dim = q.shape
    sums = accumulator(q.dtype)
    queries = np.multiply(q, scale, dtype=sums).reshape(len(k), -1, dim)
    scores = np.matmul(queries, k.astype(sums, copy=False).swapaxes(1, 2))
    largest = scores.max(2, keepdims=True)
    np.exp(np.subtract(scores, largest, out=scores), out=scores)
    total = scores.sum(2, keepdims=True)
    out = np.matmul(scores, v.astype(sums, copy=False))
    return np.divide(out, total, out=out).reshape(heads, -1), (largest + np.log(total)).ravel()
