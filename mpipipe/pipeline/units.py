"""A batch cut into units and put together: micro-batches along axis 0, their slices along axis 1.

With slices, unit m n + s is slice s of micro-batch m:

    rows 0-1  | unit 0 | unit 1 | unit 2 |        micro-batch 0, in n = 3 slices
    rows 2-3  | unit 3 | unit 4 | unit 5 |        micro-batch 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

from mpipipe import arrays
from mpipipe.arrays import Shape, Tree, flatten, read_only, unflatten
from mpipipe.comm import check_sendable
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.text import counted

AskedBatch: TypeAlias = Any  # the class of batch.py
T = TypeVar("T")


def rows_of(tree: Tree, axis: int = 0) -> int:
    """Return the extent of an axis that all leaves share; ArgumentError if they do not."""
    return _extent(_shapes(_sendable(tree)), axis)


def rows_of_any(tree: Tree) -> int:
    """Return the rows that all leaves share, or 0 for arrays of other shapes, such as a graph.

    Raises ArgumentError for a micro-batch without rows. Some of its arrays may have none: a graph
    has perhaps no edges.
    """
    leaves = _sendable(tree)
    if not leaves or 0 in leaves[0].shape[:1] or not any(leaf.size for leaf in leaves):
        raise ArgumentError(
            "an empty micro-batch",
            found=", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "no arrays",
            expected="at least 1 row in the first array",
            remedy="leave out what is empty, such as a graph without nodes, before you make "
            "micro-batches",
        )
    extents = set()
    for leaf in leaves:
        extents.add(leaf.shape[0] if leaf.ndim else 0)
    if len(extents) > 1:
        return 0
    return extents.pop()


def _sendable(tree: Tree) -> list[arrays.Array]:
    leaves, _ = flatten(tree)
    for leaf in leaves:
        check_sendable(leaf)
    return leaves


def _shapes(leaves: Sequence[arrays.Array]) -> list[Shape]:
    return [leaf.shape for leaf in leaves]


def _extent(shapes: Sequence[Shape], axis: int) -> int:
    extents = set()
    for shape in shapes:
        extents.add(shape[axis] if len(shape) > axis else -1)
    if len(extents) != 1 or -1 in extents:
        what = "rows"
        form = "(rows, ...)"
        remedy = None
        if axis == 1:
            what = "positions"
            form = "(rows, positions, ...)"
            remedy = "give each array an axis 1 of positions; or take a schedule without slices"
        raise ArgumentError(
            f"the arrays of a batch do not share an axis of {what}",
            found=f"shapes {[*shapes]}",
            expected=f"{form}, with as many {what} in each",
            remedy=remedy,
        )
    return extents.pop()


def split(batch: Tree | list[Tree], microbatches: int) -> tuple[list[Tree], list[int]]:
    """Cut a batch along axis 0; return the micro-batches and the rows of each.

    A list is cut already.

    Arrays of an entry of a list may have any shapes; the number is 0 where they share no axis of
    rows.

    On the host the micro-batches are read-only views of the user's arrays, of numpy.ndarray itself
    where those are of a subclass, such as numpy.memmap. Raises ArgumentError for a batch that is
    too small or cannot be sent.
    """
    if isinstance(batch, list):
        if len(batch) != microbatches:
            raise ArgumentError(
                "a list of micro-batches has the wrong length",
                found=len(batch),
                expected=f"{microbatches}, as in the schedule",
            )
        return [*map(read_only, batch)], _counts(batch)
    if microbatches == 1:  # nothing is cut
        return [read_only(batch)], [rows_of_any(batch)]
    rows = rows_of(batch)
    if rows < microbatches:
        raise ArgumentError(
            "the batch is smaller than the number of micro-batches",
            found=counted(rows, "row"),
            expected=f"at least {microbatches}",
            remedy="use a bigger batch, or a schedule with fewer micro-batches",
        )
    counts, ranges = _ranges(rows, microbatches)
    leaves, structure = flatten(read_only(batch))
    if structure is None:
        return [leaves[0][at] for at in ranges], counts
    parts = []
    for at in ranges:
        parts.append(unflatten([leaf[at] for leaf in leaves], structure))
    return parts, counts


def _counts(batch: Sequence[Tree]) -> list[int]:
    counts = []
    for number, tree in enumerate(batch):
        try:
            counts.append(rows_of_any(tree))
        except ArgumentError as error:
            error.microbatch = number
            raise
    return counts


@lru_cache(maxsize=64)
def _ranges(rows: int, microbatches: int) -> tuple[list[int], list[slice]]:
    """Rows of each micro-batch, and where it lies in the batch."""
    parts = even_split(rows, microbatches)
    return [len(part) for part in parts], [slice(part.start, part.stop) for part in parts]


def split_as(whole: Tree | list[Tree], pieces: list[Tree], axis: int = 0) -> list[Tree]:
    """Cut gradients of `merge(pieces, axis)` as these lie in it. A list is cut already."""
    if isinstance(whole, list):
        if len(whole) != len(pieces):
            raise ArgumentError(
                "a list of gradients has the wrong length",
                found=len(whole),
                expected=f"{len(pieces)}, as the outputs",
            )
        return [*map(read_only, whole)]
    leaves, structure = flatten(read_only(whole))
    edges = [0, *accumulate(rows_of(piece, axis) for piece in pieces)]
    for leaf in leaves:
        if leaf is not None and (
            not arrays.is_array(leaf) or leaf.shape[axis : axis + 1] != (edges[-1],)
        ):
            expected = f"arrays of {counted(edges[-1], 'position')}"
            if axis == 0:
                listed = counted(len(pieces), "micro-batch")
                expected = f"arrays of {counted(edges[-1], 'row')}, or a list of {listed}"
            found = type(leaf).__name__
            if arrays.is_array(leaf):
                found = f"shape {leaf.shape}"
            raise ArgumentError(
                "the gradients do not match the outputs", found=found, expected=expected
            )
    parts = []
    for start, stop in pairwise(edges):
        at = (*[slice(None)] * axis, slice(start, stop))
        pieces_of_leaves = []
        for leaf in leaves:
            pieces_of_leaves.append(None if leaf is None else leaf[at])
        parts.append(unflatten(pieces_of_leaves, structure))
    return parts


def merge(pieces: Sequence[Tree], axis: int = 0) -> Tree:
    """Put micro-batches together along axis 0, or slices along axis 1."""
    if pieces[0] is None:  # a gradient of integers
        return None
    structure = flatten(pieces[0])[1]
    columns = []
    for piece in pieces:
        columns.append(flatten(piece)[0])
    whole = []
    for column in zip(*columns):
        whole.append(None if column[0] is None else arrays.concatenate(column, axis))
    return unflatten(whole, structure)


def in_order(by_unit: Mapping[int, T]) -> list[T]:
    """Return what belongs to units in the order of these."""
    return [by_unit[unit] for unit in range(len(by_unit))]


# -- Slices of micro-batches -----------------------------------------------------------------------


class Slicing:
    """How each micro-batch is cut along axis 1 into slices.

    `lengths` are their positions, by default even ones.
    """

    def __init__(self, count: int = 1, lengths: Sequence[int] | None = None) -> None:
        self.count = count
        self.lengths = lengths

    def lengths_of(self, shapes: Sequence[Shape]) -> Sequence[int]:
        """Return the positions of each slice of a micro-batch of arrays of these shapes."""
        positions = _extent(shapes, 1)
        if self.lengths is not None and sum(self.lengths) != positions:
            raise ArgumentError(
                "the lengths of the slices do not add up to the sequence",
                found=f"{' + '.join(map(str, self.lengths))} = {sum(self.lengths)}",
                expected=f"{positions} positions, as the batch has",
                remedy="give the slice_lengths of these sequences; without them slices are even",
            )
        if positions < self.count:
            raise ArgumentError(
                "the schedule has more slices than the sequences have positions",
                found=f"{self.count} slices, {counted(positions, 'position')}",
                expected="at least one position for each slice",
                remedy="take a schedule with fewer slices, or longer sequences",
            )
        return self.lengths or [len(part) for part in even_split(positions, self.count)]

    def cut(self, tree: Tree) -> list[Tree]:
        """Return the slices of a micro-batch, read-only and contiguous."""
        leaves, structure = flatten(tree)
        lengths = self.lengths_of(_shapes(leaves))
        parts = []
        start = 0
        for length in lengths:
            part = unflatten([leaf[:, start : start + length] for leaf in leaves], structure)
            parts.append(read_only(arrays.in_c_order(part)))
            start += length
        return parts

    def cut_as(self, gradients: list[Tree], units: list[Tree]) -> list[Tree]:
        """Cut gradients of `whole(units)` as the units lie in it."""
        if self.count == 1:
            return gradients
        cut: list[Tree] = []
        for gradient, slices in zip(gradients, self._by_microbatch(units)):
            cut += split_as(gradient, slices, 1)
        return [*map(arrays.in_c_order, cut)]

    def units(self, batch: list[Tree] | AskedBatch) -> Any:
        """Return the units of a batch, by their numbers; ArgumentError if it cannot be cut."""
        if self.count == 1:
            return batch
        if isinstance(batch, list):
            parts: list[Tree] = []
            for tree in batch:
                parts += self.cut(tree)
            return parts
        for shapes in shapes_of(batch):
            self.lengths_of(shapes)
        return AskedSlices(batch, self)

    def counts(self, counts: Sequence[float], batch: list[Tree] | AskedBatch) -> list[float]:
        """Return what each unit counts, by its positions, from what the micro-batches count."""
        of_units = []
        for count, shapes in zip(counts, shapes_of(batch)):
            lengths = self.lengths_of(shapes)
            of_units += [count * length / sum(lengths) for length in lengths]
        return of_units

    def whole(self, units: Sequence[Tree]) -> list[Tree]:
        """Put units together: return micro-batches."""
        if self.count == 1:
            return [*units]
        return [merge(slices, 1) for slices in self._by_microbatch(units)]

    def _by_microbatch(self, units: Sequence[Tree]) -> list[list[Tree]]:
        count = self.count
        return [[*units[at : at + count]] for at in range(0, len(units), count)]


def shapes_of(batch: list[Tree] | AskedBatch) -> list[list[Shape]]:
    """Return the shapes of the arrays of each micro-batch."""
    shapes = []
    if isinstance(batch, list):
        for tree in batch:
            shapes.append(_shapes(flatten(tree)[0]))
    else:
        for spec in batch.specs:
            shapes.append([shape for shape, _ in spec.leaves])
    return shapes


class AskedSlices:
    """The slices of micro-batches that a user's function gives.

    A micro-batch is asked for with its first slice, and kept to its last.

    On each stage the slices of a sequence are taken in rising order.
    """

    def __init__(self, batch: AskedBatch, slicing: Slicing) -> None:
        self._batch = batch
        self._slicing = slicing
        # By micro-batch, the next slice last.
        self._left: dict[int, list[Tree]] = {}

    def __getitem__(self, unit: int) -> Tree:
        microbatch, number = divmod(unit, self._slicing.count)
        if number == 0:
            self._left[microbatch] = self._slicing.cut(self._batch[microbatch])[::-1]
        return self._left[microbatch].pop()
