"""What a rank does in one pass of attention, and how blocks become messages.

A rank alone is a ring of one step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.attention.kernels import AttentionKernel
from mpipipe.attention.kernels.interface import check_arrays
from mpipipe.attention.layout import Layout, ring_hops
from mpipipe.attention.mask import Slice, check_scale, check_window, document_offsets, each_row_once
from mpipipe.comm import ROTATIONS
from mpipipe.errors import ArgumentError
from mpipipe.job import Ballot, Communicator, group_of, raise_on_all

BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class RingOptions:
    """The options of a ring; those that were checked compare equal if they are equal."""

    causal: bool
    layout: Any  # a Layout; when checked, its kind
    window: int | None
    segments: Any  # when checked, None or a tuple of int
    scale: float | None
    seq_len: int | None = None
    rotation: str = "overlap"
    slice_lengths: tuple[int, ...] | None = None  # the same as of the Layout
    # In one forward, offsets of the documents of each row.
    rows: tuple[tuple[int, ...], ...] | None = None
    # In one forward, the slice whose queries see its keys and those of earlier slices.
    part: int | None = None

    def checked(self, ranks: int) -> RingOptions:
        """Return the options in plain types; ArgumentError for one without sense."""
        layout = self.layout
        seq_len = self.seq_len
        segments = self.segments
        lengths = self.slice_lengths
        if isinstance(layout, Layout):
            if ranks != layout.ranks or seq_len not in (None, layout.seq_len):
                raise ArgumentError(
                    "the layout of a ring has another number of ranks, or another length",
                    found=repr(layout),
                    expected=f"{ranks} ranks, as in the communicator, and seq_len "
                    f"{seq_len or layout.seq_len}",
                    remedy="give Ring the Layout that cuts its data, and no seq_len",
                )
            lengths = layout.slice_lengths or lengths
            seq_len = layout.seq_len
            layout = layout.kind
        check_window(self.causal, self.window)
        check_scale(self.scale)
        Layout(layout, ranks, 0)  # it knows the kinds
        if self.rotation not in ROTATIONS:
            raise ArgumentError(
                "unknown rotation", found=repr(self.rotation), expected=" or ".join(ROTATIONS)
            )
        if segments is not None:
            numbers = np.asarray(segments)
            if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
                raise ArgumentError(
                    "segments", found=repr(segments)[:80], expected="one axis of integers"
                )
            segments = tuple(numbers.tolist())
        return RingOptions(
            bool(self.causal),
            layout,
            None if self.window is None else int(self.window),
            segments,
            None if self.scale is None else float(self.scale),
            None if seq_len is None else int(seq_len),
            self.rotation,
            lengths,
        )

    def whole(self, ranks: int, seq_len: int) -> Layout:
        """The layout of a sequence of this length on the ranks."""
        return Layout(self.layout, ranks, seq_len, self.slice_lengths)

    @cached_property
    def digest(self) -> str:
        """A short text, the same for equal options. Segments can be long."""
        return blake2b(repr(self).encode(), digest_size=8).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)


class RingShapes(NamedTuple):
    """What the arrays of all ranks of a ring have in common."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str


def shapes_of(q: Array, k: Array, v: Array) -> RingShapes:
    """The shapes of arrays of a rank."""
    batch, _, heads, head_dim = q.shape
    sizes = batch, heads, k.shape[2], head_dim, v.shape[3]
    return RingShapes(*sizes, q.dtype.name, arrays.device_of(q))


@dataclass(frozen=True)
class KVMessage:
    """How the keys and values of a rank, or their gradients, are packed.

    A message is an array of bytes: the gradients of a block of keys and of values, then the keys
    and values of a block, one array after the other, all C-contiguous. Either half may be missing.
    """

    shapes: RingShapes
    lengths: tuple[int, ...]  # number of keys of each rank; methods count ranks modulo the ring
    dtype: np.dtype

    def nbytes(self, rank: int) -> int:
        """Bytes of the keys and values of a rank."""
        width = self.shapes.head_dim + self.shapes.value_dim
        return prod(self._shape(rank)) * width * self.dtype.itemsize

    def empty(self, nbytes: int) -> Array:
        """A buffer of bytes."""
        return arrays.empty(nbytes, BYTES, self.shapes.device)

    def pack(self, rank: int, k: Array, v: Array) -> Array:
        """A new buffer with the keys and values of a rank."""
        message = self.empty(self.nbytes(rank))
        for place, x in zip(self.unpack(message, rank), (k, v)):
            arrays.strided_copy(x, place)
        return message

    def unpack(self, message: Array, rank: int) -> tuple[Array, Array]:
        """Return the keys and values of a rank as views of a buffer."""
        flat = message[: self.nbytes(rank)].view(self.dtype)
        shape = self._shape(rank)
        middle = prod(shape) * self.shapes.head_dim
        keys = flat[:middle].reshape(*shape, self.shapes.head_dim)
        values = flat[middle:].reshape(*shape, self.shapes.value_dim)
        return keys, values

    def _shape(self, rank: int) -> tuple[int, int, int]:
        return self.shapes.batch, self.lengths[rank % len(self.lengths)], self.shapes.kv_heads


class RingPlan(NamedTuple):
    """What one rank does in a forward or backward."""

    steps: int  # ring steps
    # For each step t, what this rank's queries need of the keys of rank r - t.
    slices: tuple[list[Slice], ...]
    overwrite: bool  # whether each row of queries lies in exactly one slice of the first step
    message: KVMessage  # how keys and values travel
    gradients: KVMessage  # how their gradients travel: as sums
    scale: float
    layout: Layout  # layout of the queries
    keys: Layout
    rank: int

    @property
    def last_owner(self) -> int:
        """The rank whose keys and values come in the last step of a forward."""
        return (self.rank - self.steps + 1) % self.layout.ranks


class RingSaved(NamedTuple):
    """What the forward of `Local` or `Ring` keeps for its backward."""

    plan: RingPlan
    call: int  # number of the forward
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    message: Array | None  # keys and values of the last step's block; None in a ring of one step


@lru_cache(maxsize=64)
def make_plan(
    options: RingOptions, shapes: RingShapes, rank: int, rows: Sequence[int], keys: Sequence[int]
) -> RingPlan:
    """Return the plan of a rank, from the rows and keys of all; ArgumentError if they misfit."""
    size = len(rows)
    if options.part is None:
        queries = _layout(options, rows, "queries", options.seq_len)
        others = queries
        if keys != rows:
            others = _layout(replace(options, slice_lengths=None), keys, "keys")
    else:
        pairs, steps = slice_layouts(replace(options, segments=None, rows=None, part=None), size)
        queries, others = pairs[options.part]
    seq_len = sum(options.slice_lengths or rows)
    if seq_len > 1 and np.array_equal(options.segments, np.ones(seq_len)):
        raise ArgumentError(
            "segments that may be one document, or documents of one position each",
            found=f"{seq_len} times the number 1, for {seq_len} positions",
            remedy=f"segments=[{seq_len}] is one document; segments=range({seq_len}) are "
            "documents of one position",
        )
    whole = document_offsets(options.segments, seq_len)
    # An empty batch sees nothing.
    documents = [whole][: shapes.batch]
    if options.rows is not None:
        documents = [list(offsets) for offsets in options.rows]
    if any(documents) and others is not queries and options.part is None:
        raise ArgumentError(
            "segments need queries and keys of one sequence",
            found=f"rows {[*rows]}, keys {[*keys]}",
        )
    if options.rows is not None and any(offsets[-1] != seq_len for offsets in options.rows):
        raise ArgumentError(
            "segments of another sequence", found=options.rows[0][-1], expected=seq_len
        )
    views = []
    for offsets in documents:
        view = options.causal, options.window, offsets, None if others is queries else others
        views.append(view)
    if options.part is None:
        steps = max((queries.steps(*view) for view in views), default=1)  # a batch may be empty
    slices: tuple[list[Slice], ...] = tuple([] for _ in range(steps))
    for parts, (*_, owner) in zip(slices, ring_hops(rank, size, steps)):
        for number, view in enumerate(views):
            # where a later row of the batch begins
            row = number * rows[rank]
            key = number * keys[owner]
            for q0, q1, k0, k1, low, high in queries.needs(rank, owner, *view):
                parts.append(Slice(q0 + row, q1 + row, k0 + key, k1 + key, low, high))
    dtype = arrays.dtype(shapes.dtype)
    if options.rows is not None:  # the rows of the batch are one sequence
        shapes = shapes._replace(batch=1)
    lengths = tuple(len(views) * count for count in keys)
    message = KVMessage(shapes, lengths, dtype)
    gradients = replace(message, dtype=arrays.accumulator(dtype))
    overwrite = each_row_once(slices[0], len(views) * rows[rank])
    scale = options.scale
    if scale is None:
        scale = shapes.head_dim**-0.5
    return RingPlan(steps, slices, overwrite, message, gradients, scale, queries, others, rank)


def _layout(
    options: RingOptions, rows: Sequence[int], name: str, seq_len: int | None = None
) -> Layout:
    """The layout with these numbers of rows."""
    layout = options.whole(len(rows), sum(rows) if seq_len is None else seq_len)
    expected = [*map(layout.length, range(layout.ranks))]
    if [*rows] != expected:
        raise ArgumentError(
            f"the shards of {name} do not cover the sequence",
            found=f"{[*rows]} rows on the ranks",
            expected=f"{expected}, the {layout.kind} shards of {layout.seq_len} positions",
            remedy="cut the sequence with attention.Layout(...).shard",
        )
    return layout


# -- Slices of a sequence: queries see the keys of their own and of earlier ones -------------------


@lru_cache(maxsize=64)
def slice_layouts(options: RingOptions, ranks: int) -> tuple[list[tuple[Layout, Layout]], int]:
    """Return the layouts of queries and keys of each slice, and the number of ring steps.

    It is the same for all slices, so that the last step of each has the keys of one rank.
    """
    lengths = options.slice_lengths or ()
    window = options.window
    pairs = []
    whole = options.whole(ranks, sum(lengths))
    ends = [*accumulate(lengths)]
    for part, length in enumerate(lengths):
        first = 0
        if window is not None:
            first = bisect_right(ends, max(0, ends[part] - length - window + 1))
        pairs.append((whole.part(part, part + 1), whole.part(first, part + 1)))
    return pairs, max(queries.steps(True, window, None, keys) for queries, keys in pairs)


# -- Rows with several documents each: they are attended to as one sequence ------------------------
#
#     row 0   a a a b b b b b        as one sequence   a a a b b b b b|c c c c c c d d
#     row 1   c c c c c c d d
#
# A row begins a document, so nothing is seen across rows, and one call does them all.


def documents_of_rows(segments: np.ndarray, batch: int) -> tuple[tuple[int, ...], ...]:
    """Return for each row of `segments` where its documents begin, and its length.

    `segments` (batch, seq) are integers, the document of each position; equal numbers of a row
    stand together.
    """
    numbers = np.asarray(segments)
    if numbers.ndim != 2 or len(numbers) != batch or numbers.dtype.kind not in "iu":
        raise ArgumentError(
            "segments of a forward",
            found=f"{numbers.dtype}{list(numbers.shape)}",
            expected=f"integers ({batch}, seq), the document of each position of each row",
        )
    return tuple(tuple(document_offsets(row, numbers.shape[1]) or ()) for row in numbers)


def with_batch(x: Array, batch: int) -> Array:
    """Return rows of a batch as one sequence (1, rows, heads, dim), or the reverse.

    It is a view where strides allow it.
    """
    if len(x) == batch:
        return x
    if arrays.is_device(x) and not is_view(x, batch):
        x = arrays.copied(x)
    return x.reshape(batch, x.shape[0] * x.shape[1] // batch, *x.shape[2:])


def is_view(x: Array, batch: int) -> bool:
    """Whether `with_batch` of an array is a view, so that what is written to it arrives."""
    return len(x) in (1, batch) or x.strides[0] == x.shape[1] * x.strides[1]


def like(dout: Array, out: Array) -> Array:
    """Return a gradient shaped as the saved output, whose batch may be one sequence."""
    fits = arrays.is_array(dout) and dout.size == out.size and dout.shape[2:] == out.shape[2:]
    if fits and len(out) == 1:
        return with_batch(dout, 1)
    return dout


# -- The ranks of a ring agree: one small all-gather before each forward and backward --------------


REMEDY = (
    "give the same options and arrays of the same kind on all ranks, and make the same calls "
    "in the same order"
)
# The options of a forward, and q, k and v.
Given: TypeAlias = "tuple[RingOptions, Array, Array, Array]"
# The plan of a rank, its kernel, and the number of the call.
Agreed: TypeAlias = "tuple[RingPlan, AttentionKernel, int]"


# One agreement of the ranks of a ring.
RingBallot = partial(Ballot, remedy=REMEDY, where=" of a ring")


class Alone:
    """The agreements of a rank without others."""

    rank = 0
    size = 1
    calls = 0  # number of forwards so far
    # Ends calls of other threads that are due before.
    settle: Callable[[], object] = staticmethod(kernels.no_poll)

    def agree_on_options(self, given: Callable[[], RingOptions]) -> RingOptions:
        """Check the options of a ring, and that all ranks have the same; collective."""
        return given().checked(self.size)

    def agree_on_forward(self, given: Callable[[], Given], more: str = "") -> Agreed:
        """Compare options, shapes and dtype of a forward, and `more`; collective."""
        self.settle()
        self.calls += 1
        facts: tuple = ()
        lengths = (0, 0)
        error = None
        try:
            options, q, k, v = given()
            check_arrays(q, k, v)
            kernel = kernels.chosen(q, k, v)  # a rank without it must not leave the others waiting
            shapes = shapes_of(q, k, v)
            facts = (*zip(shapes._fields, shapes), ("options", options.digest + more))
            lengths = (q.shape[1], k.shape[1])
        except Exception as caught:
            error = caught
        ballot = RingBallot("forward", facts, error, number=self.calls)
        rows, keys = self._cast(ballot, lengths).T.tolist()
        try:
            plan = make_plan(options, shapes, self.rank, tuple(rows), tuple(keys))
        except ArgumentError as refusal:  # every rank finds the same in the same table
            self.refuse(refusal)
        return plan, kernel, self.calls

    def agree_on_backward(
        self, call: int, dout: Array, out: str, *, error: Exception | None = None
    ) -> None:
        """Check that all ranks begin the backward of the same forward; collective."""
        self.settle()
        if error is None and described(dout) != out:
            error = ArgumentError(
                "the gradient of the output does not fit the output",
                found=described(dout),
                expected=out,
            )
        self._cast(RingBallot("backward", error=error, number=call))

    def _cast(self, ballot: Ballot, values: Sequence[int] = ()) -> np.ndarray:
        if ballot.error is not None:
            raise ballot.error
        return np.array([values])

    def failing(self, what: str) -> AbstractContextManager[None]:
        """As `RankGroup.failing`."""
        return nullcontext()

    def refuse(self, error: ArgumentError) -> NoReturn:
        """Raise an error that all ranks have found alike."""
        raise error


class RingAgreement(Alone):
    """The agreements of all rings on one communicator.

    Every method is collective, and raises the same error on every rank if the ranks differ or one
    of them has an error.
    """

    def __init__(self, comm: Communicator) -> None:
        self.group = group_of(comm)
        self.rank = self.group.rank
        self.size = self.group.size

    def agree_on_options(self, given: Callable[[], RingOptions]) -> RingOptions:
        call = "construction of a Ring"
        with self.group.raise_together(call):
            options = super().agree_on_options(given)
        self.group.agree(call, tuple(vars(options).items()), remedy=REMEDY)
        return options

    def _cast(self, ballot: Ballot, values: Sequence[int] = ()) -> np.ndarray:
        table = ballot.cast(self.group, values)
        ballot.decide()
        return table

    def failing(self, what: str) -> AbstractContextManager[None]:
        return self.group.failing(what)

    def refuse(self, error: ArgumentError) -> NoReturn:
        raise_on_all(0, error, self.group)

    def close(self) -> None:
        """Close nothing: the group is closed by itself."""


def described(x: Any) -> str:
    """Return the dtype, the shape and the device of an array as text."""
    if not arrays.is_array(x):
        return type(x).__name__
    return f"{x.dtype}{list(x.shape)} on {arrays.device_of(x)}"
