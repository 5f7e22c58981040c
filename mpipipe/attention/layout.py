"""Who holds which positions of a sequence that is spread over the ranks of a ring.

    8 positions, 2 ranks       rank 0        rank 1
    contiguous                 0 1 2 3       4 5 6 7
    zigzag                     0 1 6 7       2 3 4 5        first and last of 2N chunks, and inwards
    striped                    0 2 4 6       1 3 5 7

Under a causal mask later positions have more to do. Contiguous shards are then uneven. Zigzag
shards are exactly even if 2N divides the length, striped shards nearly even. Any length works, also
one shorter than the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpipipe.attention.mask import PositionRange, Slice, mask_slices
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.text import text_table

KINDS = ("contiguous", "zigzag", "striped")


class Layout:
    """The shards of a sequence.

    Parameters
    ----------
    kind : str
        "contiguous", "zigzag" or "striped", see the picture above.
    ranks, seq_len : int
        Size of the ring, N, and length of the whole sequence.
    slice_lengths : sequence of int, optional
        Lengths of the slices in which the sequence comes, see `Sliced`: each slice is cut into
        shards as a sequence of its own, and a rank holds its shards of all slices one after the
        other.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.attention import Layout
    >>> layout = Layout("zigzag", ranks=2, seq_len=8)
    >>> [layout.positions(rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> whole = 10 * np.arange(8).reshape(1, 8)
    >>> shards = [layout.shard(whole, rank) for rank in range(2)]
    >>> shards[1]
    array([[20, 30, 40, 50]])
    >>> bool((layout.unshard(shards) == whole).all())
    True
    """

    _first = 0  # position of the first row of all, in the whole sequence

    def __init__(
        self, kind: str, ranks: int, seq_len: int, slice_lengths: Sequence[int] | None = None
    ) -> None:
        if kind not in KINDS:
            raise ArgumentError("unknown layout", found=repr(kind), expected=" or ".join(KINDS))
        for name, value, least in (("ranks", ranks, 1), ("seq_len", seq_len, 0)):
            if not isinstance(value, (int, np.integer)) or value < least:
                raise ArgumentError(
                    f"layout: {name}", found=repr(value), expected=f"an integer of at least {least}"
                )
        self.kind = kind
        self.ranks = int(ranks)
        self.seq_len = int(seq_len)
        self.slice_lengths: tuple[int, ...] | None = None
        if slice_lengths is not None:
            self.slice_lengths = checked_lengths(slice_lengths, self.seq_len)

    def __repr__(self) -> str:
        slices = ""
        if self.slice_lengths is not None:
            slices = f", slice_lengths={self.slice_lengths}"
        return f"Layout({self.kind!r}, ranks={self.ranks}, seq_len={self.seq_len}{slices})"

    def part(self, first: int, stop: int) -> Layout:
        """Return the layout of slices first ... stop - 1, with positions in the whole sequence."""
        assert self.slice_lengths is not None
        lengths = self.slice_lengths[first:stop]
        part = Layout(self.kind, self.ranks, sum(lengths), lengths)
        part._first = self._first + sum(self.slice_lengths[:first])
        return part

    @cached_property
    def _ranges(self) -> list[list[PositionRange]]:
        """Return the position ranges of each rank, in the order of its rows, slice by slice."""
        ranges: list[list[PositionRange]] = [[] for _ in range(self.ranks)]
        first = self._first
        for length in self.slice_lengths or (self.seq_len,):
            for own, more in zip(ranges, _shards(self.kind, self.ranks, length)):
                rows = sum(part.rows for part in own)
                for start, count, at, stride in more:
                    own.append(PositionRange(rows + start, count, first + at, stride))
            first += length
        return ranges

    def length(self, rank: int) -> int:
        """Return the number of positions that a rank holds."""
        return sum(part.rows for part in self._ranges[rank])

    def weight(self, rank: int) -> int:
        """Return the weight of a rank's shard in a mean over all positions of a sequence.

        A loss that is a mean over the positions of some sequences returns as its weight their
        number times this; see `Pipeline`.
        """
        return self.length(rank)

    def positions(self, rank: int) -> np.ndarray:
        """Return the position of each row of a rank in the whole sequence.

        Returns
        -------
        numpy.ndarray
            (length(rank),), int64, rising.
        """
        ranges = []
        for part in self._ranges[rank]:
            ranges.append(part.first + part.stride * np.arange(part.rows))
        return np.concatenate(ranges).astype(np.int64)

    def shard(self, array: np.ndarray, rank: int, axis: int = 1) -> np.ndarray:
        """Cut out the rows that a rank holds.

        Parameters
        ----------
        array : numpy.ndarray
            `seq_len` long along `axis`, else ArgumentError is raised.
        rank, axis : int

        Returns
        -------
        numpy.ndarray
            A C-contiguous copy, `length(rank)` long along `axis`.
        """
        if array.shape[axis] != self.seq_len:
            raise ArgumentError(
                "the array to shard has another length",
                found=f"{array.shape[axis]} along axis {axis}",
                expected=f"seq_len {self.seq_len}",
            )
        return np.ascontiguousarray(array.take(self.positions(rank), axis=axis))

    def unshard(self, arrays: Sequence[np.ndarray], axis: int = 1) -> np.ndarray:
        """Put the whole array together from the shards of all ranks.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            In rank order. ArgumentError is raised where their lengths are not those of the layout.
        axis : int

        Returns
        -------
        numpy.ndarray
            `seq_len` long along `axis`.
        """
        lengths = [array.shape[axis] for array in arrays]
        positions = [*map(self.positions, range(self.ranks))]
        expected = [*map(len, positions)]
        if lengths != expected:
            raise ArgumentError(
                "the shards have other lengths than the layout", found=lengths, expected=expected
            )
        order = np.argsort(np.concatenate(positions))
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
        """Return what the queries of one rank need of the keys of another.

        Parameters
        ----------
        q_rank, k_rank : int
            The ranks that hold the queries and the keys.
        causal, window : bool and int, optional
            As for `Local`.
        documents : sequence of int, optional
            Positions at which documents begin, rising from 0, and `seq_len` at the end. A query
            sees its own document.
        keys : Layout, optional
            Layout of the keys, if they are another sequence.

        Returns
        -------
        list of mpipipe.attention.mask.Slice
            Empty if the queries see no key.

        Examples
        --------
        >>> from mpipipe.attention import Layout
        >>> Layout("contiguous", ranks=2, seq_len=8).needs(1, 0)
        [Slice(q_start=0, q_stop=4, k_start=0, k_stop=4, low=None, high=None)]
        """
        if causal and window is None and documents is None and q_rank == k_rank and keys is None:
            # They are in the order of their positions, so causality is that of the rows.
            rows = self.length(q_rank)
            if rows == 0:
                return []
            return [Slice(0, rows, 0, rows, None, 0 if rows > 1 else None)]
        return mask_slices(
            self._ranges[q_rank], (keys or self)._ranges[k_rank], causal, window, documents
        )

    def steps(
        self,
        causal: bool,
        window: int | None = None,
        documents: Sequence[int] | None = None,
        keys: Layout | None = None,
    ) -> int:
        """Return the number of ring steps that some rank needs.

        In step t rank r has the keys of rank r - t.

        It is `ranks`, or less with a window.

        Parameters
        ----------
        causal, window, documents, keys : bool, int, sequence of int and Layout
            As for `needs`.

        Examples
        --------
        >>> from mpipipe.attention import Layout
        >>> Layout("contiguous", ranks=4, seq_len=1024).steps(causal=True, window=100)
        2
        """
        for step in range(self.ranks - 1, 0, -1):
            for rank in range(self.ranks):
                if self.needs(rank, (rank - step) % self.ranks, causal, window, documents, keys):
                    return step + 1
        return 1

    def table(
        self, rank: int, causal: bool = True, window: int | None = None, *, backward: bool = False
    ) -> RingTable:
        """Return what a rank does in each step of a ring, as a list that prints as a table.

        Parameters
        ----------
        rank : int
            ArgumentError is raised where the layout has no such rank.
        causal, window : bool, int
            As for `needs`.
        backward : bool
            The steps of the backward in place of those of the forward.

        Examples
        --------
        >>> from mpipipe.attention import Layout
        >>> print(Layout("contiguous", ranks=3, seq_len=12).table(1))
        step  send to  receive from  keys of  mask    pairs
        ----  -------  ------------  -------  ------  -----
           0        2             0        1  causal     10
           1        2             0        0  full       16
           2        -             -        2  none        0
        """
        if not 0 <= rank < self.ranks:
            raise ArgumentError(
                "no such rank in the layout", found=rank, expected=f"0 to {self.ranks - 1}"
            )
        table = RingTable()
        for hop in ring_hops(rank, self.ranks, self.steps(causal, window), backward):
            slices = self.needs(rank, hop[-1], causal, window)
            pairs = sum(part.pairs for part in slices)
            most = self.length(rank) * self.length(hop[-1])
            mask = "part"
            if pairs == 0:
                mask = "none"
            elif pairs == most:
                mask = "full"
            elif len(slices) == 1 and slices[0][4:] == (None, 0):
                mask = "causal"
            table.append(RingStep(*hop, mask, pairs))
        return table


def _shards(kind: str, ranks: int, seq_len: int) -> list[list[PositionRange]]:
    """The position ranges of each rank in a sequence that comes as a whole."""
    if kind == "striped":
        counts = [len(range(rank, seq_len, ranks)) for rank in range(ranks)]
        return [[PositionRange(0, count, rank, ranks)] for rank, count in enumerate(counts)]
    if kind == "contiguous":
        chunks = ranks
    else:
        chunks = 2 * ranks
    parts = even_split(seq_len, chunks)
    firsts = [PositionRange(0, len(part), part.start, 1) for part in parts[:ranks]]
    if kind == "contiguous":
        return [[first] for first in firsts]
    shards = []
    for first, last in zip(firsts, reversed(parts)):
        shards.append([first, PositionRange(first.rows, len(last), last.start, 1)])
    return shards


def checked_lengths(lengths: Sequence[int], seq_len: int | None = None) -> tuple[int, ...]:
    """Return the lengths of slices; ArgumentError unless they add up to `seq_len`."""
    numbers = tuple(lengths)
    integers = all(isinstance(length, (int, np.integer)) and length > 0 for length in numbers)
    if not numbers or not integers or seq_len not in (None, sum(numbers)):
        raise ArgumentError(
            "lengths of the slices of a sequence",
            found=f"{list(numbers)}",
            expected=f"integers of at least 1 that add up to {seq_len or 'the sequence'}",
            remedy="attention.slice_lengths(seq_len, slices, ...), with no more slices than "
            "positions",
        )
    return tuple(map(int, numbers))


# -- The steps of a ring: one table, which `Ring` executes -----------------------------------------


class RingStep(NamedTuple):
    """One step of a rank in a ring: it attends to a block while messages leave and come.

    Attributes
    ----------
    step : int
        Its number, from 0.
    send_to, receive_from : int or None
        The ranks of these messages; None where there are none.
    keys_of : int
        The rank whose keys and values the queries see.
    mask : str
        "full": each query sees each key. "causal": one triangle of them. "none". "part": other
        parts, such as the half blocks of zigzag shards and the bands of windows.
    pairs : int
        Number of (query, key) pairs that see each other.
    """

    step: int
    send_to: int | None
    receive_from: int | None
    keys_of: int
    mask: str
    pairs: int


class RingTable(list[RingStep]):
    """The steps of one rank in a pass of a ring, from `Layout.table`; `str` draws them."""

    def __str__(self) -> str:
        rows = []
        for step in self:
            rows.append(["-" if cell is None else str(cell) for cell in step])
        names = [name.replace("_", " ") for name in RingStep._fields]
        return "\n".join(text_table(names, rows, left=(4,)))


def ring_hops(
    rank: int, ranks: int, steps: int, backward: bool = False
) -> Iterator[tuple[int, Any, Any, int]]:
    """Yield the steps of `ring_pass`: number, ranks to send to and receive from, owner of keys."""
    order = [*range(steps)]  # hops that keys have made
    way = 1
    if backward:
        order.reverse()
        way = -1
    for step, hops in enumerate(order):
        moves = step < steps - 1
        if backward:
            moves = step > 0 or steps > 2
        target = None
        source = None
        if moves:
            target = (rank + way) % ranks
            source = (rank - way) % ranks
        yield step, target, source, (rank - hops) % ranks
