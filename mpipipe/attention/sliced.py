"""Exact causal attention to a sequence that comes in slices, one after the other.

A pipeline whose units are slices runs forwards of a sequence in rising order and backwards in
falling order (Sun et al., "Seq1F1B", 2024, arXiv:2406.03488). Queries of a slice see the keys of
their own slice and of all before it:

    keys of slice   0  1  2  3
    queries of 0    c                 c: causal
               1    #  c
               2    #  #  c
               3    #  #  #  c

In the forward of slice s its keys and values join those of slices 0 ... s - 1 in one buffer of the
sequence, and its queries attend to the front of that. In the backward its part of the gradients of
keys and values 0 ... s is added to sums like the buffer. Those of slice s are whole then, since the
backwards of s + 1 ... n - 1 have been before.

The buffers are dropped after the backward of slice 0, and where no backward follows, after the last
forward.

In a ring each slice is cut into shards as a sequence of its own. A rank's block is then its keys
and values of all the slices so far, and goes around once for each slice: n slices send (n + 1) / 2
times the bytes of one. Between forward and backward a rank keeps the keys and values of one other
rank besides its own, as a ring without slices does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.attention.kernels import Gradients
from mpipipe.attention.kernels.interface import check_arrays, rows_like
from mpipipe.attention.layout import checked_lengths
from mpipipe.attention.local import Local
from mpipipe.attention.ring import Ring
from mpipipe.attention.ring_pass import RingPass
from mpipipe.attention.ring_plan import (
    Given,
    RingOptions,
    RingSaved,
    described,
    documents_of_rows,
    like,
    slice_layouts,
    with_batch,
)
from mpipipe.errors import ArgumentError
from mpipipe.nn import Attend, Position
from mpipipe.text import counted


@dataclass(eq=False)
class _SlicedSequence:
    """Keys and values of the slices of a sequence so far, and the sums of their gradients.

    Arrays are views (batch, rows, kv_heads, dim) of memory in which the rows of a head lie
    together.
    """

    grows: ClassVar = True  # each slice adds to it
    number: int
    due: int  # the slice whose backward comes next
    done: int = 0  # slices that have come
    # Keys and values of this rank and, in a ring, of the rank whose block comes last.
    kept: dict[int, list[Array]] = field(default_factory=dict)
    sums: list[Array] = field(default_factory=list)


class SlicedSaved(NamedTuple):
    """What the forward of a slice keeps for its backward."""

    sequence: _SlicedSequence
    part: int  # number of the slice
    own: RingSaved  # without keys and values


class Sliced(Attend):
    """Exact causal attention for sequences in slices, the units of a pipeline.

    `begin` names the slice and its sequence: unit u is slice u mod n of sequence u // n. Slices of
    several sequences may alternate. In each, forwards come in rising order, backwards in falling
    order, and a forward may be run again before its backward. One object holds the keys of one
    layer: `nn.SelfAttention` makes its own of it.

    Arrays are those of `inner`, but with the rows of one slice: (batch, local rows of the slice,
    heads, head_dim). Their results and gradients are those of `inner` for the whole sequence, up to
    rounding.

    Parameters
    ----------
    inner : Local or Ring
        How the whole sequence is attended to: with its window, segments, scale, ranks and layout
        kind. It must be causal. Over a ring all methods are collective, as its own are.
    lengths : sequence of int
        Lengths of the n slices in the whole sequence; see `slice_lengths`.

    Attributes
    ----------
    inner, lengths : Local or Ring, tuple of int
        The arguments.
    layout : Layout
        What cuts arrays for the ranks of `inner`: a shard has the rows of slice 0, then those of
        slice 1, ...
    slice_rows : tuple of int
        Rows of each slice on this rank; `lengths` on a rank alone.
    seq_len : int
        Length of the whole sequence.

    Raises
    ------
    ArgumentError
        `inner` is not causal or of another kind, lengths are no positive integers or do not add up
        to its sequence; of methods: a slice comes out of order, or with other rows than its own.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> from mpipipe.attention import Local, Sliced
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 12, 2, 8))
    >>> attend, parts, saved = Sliced(Local(), lengths=(7, 5)), (slice(0, 7), slice(7, 12)), []
    >>> for unit, part in enumerate(parts):
    ...     attend.begin(nn.Position(microbatch=unit))
    ...     out, kept = attend.forward(q[:, part], k[:, part], v[:, part])
    ...     saved.append(kept)
    >>> whole, of_whole = Local().forward(q, k, v)
    >>> bool(np.allclose(out, whole[:, 7:]))
    True
    >>> gradients = [attend.backward(dout[:, parts[s]], saved[s]) for s in (1, 0)]
    >>> bool(np.allclose(gradients[1].dk, Local().backward(dout, of_whole).dk[:, :7]))
    True
    """

    slice_rows: tuple[int, ...]

    def __init__(self, inner: Local | Ring, lengths: Sequence[int]) -> None:
        if type(inner) not in (Local, Ring):
            raise ArgumentError(
                "slices of a sequence cannot attend in this way",
                found=type(inner).__name__,
                expected="an attention.Local or an attention.Ring",
                remedy="slices=1 for models that attend otherwise",
            )
        self.inner = inner
        self._agreement = inner.agreement
        options = self._agreement.agree_on_options(lambda: _with_slices(inner.options, lengths))
        self.lengths = options.slice_lengths or ()
        self.seq_len = sum(self.lengths)
        self._rank = self._agreement.rank
        size = self._agreement.size
        self.layout = options.whole(size, self.seq_len)
        views, _ = slice_layouts(options, size)
        self._positions = [queries.positions(self._rank) for queries, _ in views]
        self.slice_rows = tuple(map(len, self._positions))
        # For each rank and slice: the first row that its queries may see, its first row, its end.
        self._spans: list[list[tuple[int, int, int]]] = []
        for rank in range(size):
            spans = []
            stop = 0
            for queries, keys in views:
                start = stop
                stop += queries.length(rank)
                spans.append((stop - keys.length(rank), start, stop))
            self._spans.append(spans)
        self._options = [replace(options, part=part) for part in range(len(self.lengths))]
        self._others = dict[int, Sliced]()
        self._forget()

    def _forget(self) -> None:
        self._sequences: dict[int, _SlicedSequence] = {}  # under way, by their numbers
        self._now: Position | None = None
        self._step: Position | None = None  # the same for all units of a step

    def begin(self, position: Position) -> None:
        """Take the number of the next unit; a new step drops what another one has left."""
        step = position._replace(microbatch=0, recompute="")
        if step != self._step:
            self._sequences.clear()
        self._step = step
        self._now = Position(*position)  # without the values of names

    def positions(self, rows: int) -> np.ndarray:
        _, part, _ = self._unit()
        if rows != self.slice_rows[part]:
            raise self._wrong_rows(part, rows)
        return self._positions[part]

    def check_positions(self, positions: np.ndarray) -> None:
        raise ArgumentError(
            "a layer has positions of its own, and attends to slices of a sequence",
            found=f"positions={positions!r}"[:80],
            expected="no positions: each slice has those of its rows",
            remedy="leave positions out",
        )

    def for_layer(self) -> Sliced:
        other = copy(self)
        other._others = {}
        other._forget()
        return other

    def with_window(self, window: int) -> Sliced:
        if window not in self._others:
            self._others[window] = Sliced(self.inner.with_window(window), self.lengths)
        return self._others[window]

    @property
    def poll(self) -> Callable[[], object]:
        """That of `inner`."""
        return self.inner.poll

    @poll.setter
    def poll(self, poll: Callable[[], object]) -> None:
        self.inner.poll = poll

    def forward(
        self, q: Array, k: Array, v: Array, segments: np.ndarray | None = None
    ) -> tuple[Array, SlicedSaved | None]:
        """Attend from a slice to itself and all slices before it.

        Parameters
        ----------
        q, k, v : array
            As for `inner`, with the rows of the slice that `begin` has named.
        segments : array of int, optional
            As for `inner`: (batch, seq) of the whole sequences, the same in all their slices.

        Returns
        -------
        out : array
            (batch, rows, heads, value_dim), C-contiguous, of the dtype of q.
        saved : SlicedSaved or None
            For `backward`; None where no backward follows (`Position.keeps`).
        """
        plan, kernel, call = self._agreement.agree_on_forward(
            lambda: self._append(q, k, v, segments)
        )
        number, part, keeps = self._unit()
        sequence = self._sequences[number]
        # q is a view of an array with keys and values, which are kept elsewhere.
        if keeps and not q.flags.c_contiguous:
            q = arrays.copied(q)
        with self._agreement.failing("the forward of a slice"):
            keys, values = self._seen(sequence.kept[self._rank], part, self._rank)
            out, own = RingPass(self.inner, plan, kernel).forward(q, keys, values, call)
            if keeps and own.message is not None:
                # Its backward begins with this block, of which earlier slices are here already.
                block = plan.message.unpack(own.message, plan.last_owner)
                self._keep(sequence, part, plan.last_owner, [with_batch(x, len(k)) for x in block])
        if not keeps:
            if part == len(self.lengths) - 1:
                del self._sequences[number]
            return out, None
        return out, SlicedSaved(sequence, part, own._replace(k=None, v=None, message=None))

    def backward(
        self, dout: Array, saved: SlicedSaved, room: tuple[Array, Array, Array] | None = None
    ) -> Gradients:
        """Return the gradients of a slice of q, k and v.

        The backwards of all later slices of its sequence come first.

        Parameters
        ----------
        dout : array
            Gradient of `out`.
        saved : SlicedSaved
            From `forward`.
        room : tuple of array, optional
            Arrays like q, k and v, which become the results.
        """
        sequence, part, own = saved
        error = None
        if part != sequence.due:
            error = ArgumentError(
                "backwards of slices are out of order",
                found=f"slice {part} of sequence {sequence.number}",
                expected=f"slice {sequence.due}, and none after slice 0",
                remedy="run the backwards of a sequence once each, in falling order of its slices",
            )
        dout = like(dout, own.out)
        plan = own.plan
        q = own.q
        self._agreement.agree_on_backward(own.call, dout, described(own.out), error=error)
        kept = sequence.kept[self._rank]
        if not sequence.sums:
            dtype = plan.gradients.dtype
            sequence.sums = [rows_like(x, x.shape[1], dtype, arrays.zeros) for x in kept]
        keys, values = (with_batch(x, len(q)) for x in self._seen(kept, part, self._rank))
        message = None
        if plan.steps > 1:
            far = self._seen(sequence.kept[plan.last_owner], part, plan.last_owner)
            message = plan.message.pack(plan.last_owner, *(with_batch(x, len(q)) for x in far))
        own = own._replace(k=keys, v=values, message=message)
        sums = self._seen(sequence.sums, part, self._rank)
        with self._agreement.failing("the backward of a slice"):
            run = RingPass(self.inner, plan, kernels.chosen(q, keys, values))
            dq, *more = run.sums(dout, own, sums)
            for place, x in zip(sums, more):
                if x is not place:
                    arrays.strided_copy(with_batch(x, len(place)), place, add=True)
        sequence.due -= 1
        if not part and self._sequences.get(sequence.number) is sequence:
            del self._sequences[sequence.number]
        found = with_batch(dq, len(sums[0])), *self._own(sequence.sums, part, self._rank)
        targets = Gradients(*(room or (arrays.empty_like(x, q.dtype) for x in found)))
        for x, target in zip(found, targets):
            arrays.strided_copy(x, target)
        return targets

    def _unit(self) -> tuple[int, int, bool]:
        """The numbers of the next sequence and slice, and whether a backward follows."""
        if self._now is None:
            raise ArgumentError(
                "Sliced attends to a slice without having been told which",
                remedy="call begin(nn.Position(microbatch=unit)) before each forward, as "
                "nn.SelfAttention does",
            )
        return *divmod(self._now.microbatch, len(self.lengths)), self._now.keeps

    def _append(self, q: Array, k: Array, v: Array, segments: np.ndarray | None) -> Given:
        """Keep the keys and values of a slice; return its options, and q, k and v that it sees."""
        check_arrays(q, k, v)
        number, part, keeps = self._unit()
        for x in (q, k):
            if x.shape[1] != self.slice_rows[part]:
                raise self._wrong_rows(part, x.shape[1])
        sequence = self._sequences.get(number)
        if sequence is None or (part == 0 and not keeps):
            sequence = _SlicedSequence(number, due=len(self.lengths) - 1)
        done = sequence.done
        if part > done or (part < done and not keeps):
            raise ArgumentError(
                "forwards of slices are out of order",
                found=f"slice {part} of sequence {number} (unit "
                f"{part + number * len(self.lengths)})",
                expected=f"slice {done % len(self.lengths)}: {counted(done, 'slice')} of it came "
                "before",
                remedy="run the forwards of a sequence in rising order of its slices",
            )
        self._sequences[number] = sequence
        self._keep(sequence, part, self._rank, (k, v))
        sequence.done = max(done, part + 1)
        options = self._options[part]
        if segments is not None:
            options = replace(options, segments=None, rows=documents_of_rows(segments, len(q)))
        keys, values = self._seen(sequence.kept[self._rank], part, self._rank)
        return options, q, keys, values

    def _keep(
        self, sequence: _SlicedSequence, part: int, rank: int, block: Sequence[Array]
    ) -> None:
        """Keep the rows of a slice, with which the keys and values in `block` end, of a rank."""
        if rank not in sequence.kept:
            rows = self._spans[rank][-1][2]
            sequence.kept[rank] = [rows_like(x, rows, x.dtype) for x in block]
        for x, place in zip(block, self._own(sequence.kept[rank], part, rank)):
            added = x[:, x.shape[1] - place.shape[1] :]
            if described(added) != described(place):
                raise ArgumentError(
                    "the keys and values of a slice are not like those of the slices before it",
                    found=described(added),
                    expected=described(place),
                )
            arrays.strided_copy(added, place)

    def _own(self, both: Sequence[Array], part: int, rank: int) -> list[Array]:
        """The rows of a slice, of arrays along all rows of a rank."""
        _, start, stop = self._spans[rank][part]
        return [x[:, start:stop] for x in both]

    def _seen(self, both: Sequence[Array], part: int, rank: int) -> list[Array]:
        """The rows that the queries of a slice may see."""
        first, _, stop = self._spans[rank][part]
        return [x[:, first:stop] for x in both]

    def _wrong_rows(self, part: int, rows: int) -> ArgumentError:
        return ArgumentError(
            "the rows are not those of the slice",
            found=counted(rows, "row"),
            expected=f"{self.slice_rows[part]}, slice {part} of {list(self.slice_rows)}",
            remedy="cut sequences into slices of the lengths that Sliced was given, and then into "
            "shards",
        )


def _with_slices(options: RingOptions, lengths: Sequence[int]) -> RingOptions:
    """Return the options with these lengths of slices."""
    if not options.causal:
        raise ArgumentError(
            "a slice of a sequence sees no later one, so slices need a causal mask",
            found="causal=False",
            remedy="causal=True, or slices=1",
        )
    lengths = checked_lengths(lengths, options.seq_len)
    if options.slice_lengths not in (None, lengths):
        raise ArgumentError(
            "the layout of a ring has other slices",
            found=f"slice_lengths {options.slice_lengths}",
            expected=f"{lengths}, the lengths of Sliced",
        )
    return replace(options, seq_len=sum(lengths), slice_lengths=lengths)
