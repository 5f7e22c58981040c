"""A batch cut into units and put together: micro-batches along axis 0, their slices along axis 1.

With slices, unit m n + s is slice s of micro-batch m:

    rows 0-1  | unit 0 | unit 1 | unit 2 |        micro-batch 0, in n = 3 slices
    rows 2-3  | unit 3 | unit 4 | unit 5 |        micro-batch 1
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import compress
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Structure, Tree, flatten, read_only, unflatten
from mpipipe.comm import Leaf, check_sendable
from mpipipe.errors import ArgumentError, MpipipeError, PeerError, StageError
from mpipipe.even_split import even_split
from mpipipe.text import counted

T = TypeVar("T")
# A batch, its micro-batches, a function that gives them by their numbers, or nothing on this rank.
Batched: TypeAlias = "Tree | list[Tree] | Callable[[int], Tree] | None"


# -- The arrays of one unit ------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageSpec:
    """The arrays of one unit, as they travel over an edge: structure, and (shape, dtype) of each.

    Floating numbers have a gradient, other ones have none.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, tree: Tree) -> MessageSpec:
        """Return the spec of `tree`; raises ArgumentError if a leaf cannot be sent."""
        leaves, structure = flatten(tree)
        for leaf in leaves:
            check_sendable(leaf)
        return cls(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    @cached_property
    def floating(self) -> list[bool]:
        """Whether each array has a gradient."""
        return [arrays.is_floating(kind) for _, kind in self.leaves]

    @cached_property
    def gradients(self) -> tuple[Leaf, ...]:
        """(shape, dtype) of each gradient."""
        return self.with_gradients(self.leaves)

    @cached_property
    def entries(self) -> int:
        """How many numbers the arrays have."""
        return sum(prod(shape) for shape, _ in self.leaves)

    @property
    def is_one_array(self) -> bool:
        """True for one array of floating numbers, so that its gradient is one, too."""
        return self.structure is None and all(self.floating)

    @property
    def rows(self) -> int:
        """Rows that all arrays share, or 0 for arrays of other shapes, such as a graph.

        Raises ArgumentError for a micro-batch without rows. Some of its arrays may have none: a
        graph has perhaps no edges.
        """
        if not self.entries or 0 in self.leaves[0][0][:1]:
            raise ArgumentError(
                "an empty micro-batch",
                found=str(self) or "no arrays",
                expected="at least 1 row in the first array",
                remedy="leave out what is empty, such as a graph without nodes, before you make "
                "micro-batches",
            )
        extents = self._extents(0)
        if len(extents) > 1:
            return 0
        return max(0, *extents)

    def extent(self, axis: int) -> int:
        """Return the extent of an axis that all arrays share; ArgumentError if they do not."""
        extents = self._extents(axis)
        if len(extents) != 1 or -1 in extents:
            what = ("rows", "positions")[axis]
            raise ArgumentError(
                f"the arrays of a batch do not share an axis of {what}",
                found=f"shapes {[shape for shape, _ in self.leaves]}",
                expected=f"an axis {axis} with as many {what} in each; or a list of micro-batches, "
                "and a schedule without slices",
            )
        return extents.pop()

    def _extents(self, axis: int) -> set[int]:
        """The extents of an axis in all arrays; -1 stands for an array that has none."""
        extents: set[int] = set()
        for shape, _ in self.leaves:
            extents.update(shape[axis : axis + 1] or (-1,))
        return extents

    def with_rows(self, rows: int) -> MessageSpec:
        """Return the spec of arrays with another number of rows."""
        leaves = [((rows, *shape[1:]), kind) for shape, kind in self.leaves]
        return MessageSpec(self.structure, tuple(leaves))

    def with_gradients(self, items: Sequence[T]) -> tuple[T, ...]:
        """Return the items, one for each leaf, of leaves that have a gradient."""
        return tuple(compress(items, self.floating))

    def matches(self, tree: Tree) -> bool:
        """Whether `tree` has this spec and can be sent as it is."""
        if self.structure is None:  # the common case
            shape, kind = self.leaves[0]
            if type(tree) is np.ndarray:
                return tree.shape == shape and tree.dtype == kind and tree.flags.c_contiguous
            if not arrays.is_array(tree):
                return False
        return MessageSpec.of(tree) == self

    def __str__(self) -> str:
        return ", ".join(f"{kind.name}{list(shape)}" for shape, kind in self.leaves)

    def encode(self) -> bytes:
        return pickle.dumps((self.structure, self.leaves))

    @classmethod
    def decode(cls, content: bytes) -> MessageSpec:
        return cls(*pickle.loads(content))

    def gradient_tree(self, received: Sequence[Array]) -> Tree:
        """Return received gradients in the structure of the activation, None if a leaf has none."""
        source = iter(received)
        return unflatten(
            [next(source) if floating else None for floating in self.floating], self.structure
        )

    def gradient_leaves(
        self, tree: Tree, what: str = "an input gradient", like: str = "its input"
    ) -> list[Array]:
        """Return the arrays of a gradient in C order; raise ArgumentError if it does not fit."""
        if self.structure is None and self.gradients and self.matches(tree):
            return [tree]
        leaves: list = [None]
        structure: Structure = None
        if tree is not None:
            leaves, structure = flatten(arrays.in_c_order(tree))
        if structure != self.structure:
            raise ArgumentError(
                f"{what} has another structure than {like}",
                found=structure,
                expected=self.structure,
            )
        floating_leaves = [*self.with_gradients(leaves)]
        for leaf, (shape, kind) in zip(floating_leaves, self.gradients):
            is_array = arrays.is_array(leaf)
            if not is_array or leaf.shape != shape or leaf.dtype != kind:
                found = type(leaf).__name__
                if is_array:
                    found = f"{leaf.dtype.name}{list(leaf.shape)}"
                raise ArgumentError(
                    f"{what} does not match {like}",
                    found=found,
                    expected=f"{kind.name}{list(shape)}",
                )
            check_sendable(leaf)
        return floating_leaves


def rows_of_any(tree: Tree) -> int:
    """Return the `rows` of the spec of a micro-batch."""
    return MessageSpec.of(tree).rows


# -- Trees cut along an axis, and put together -----------------------------------------------------


def cut_along(tree: Tree, lengths: Sequence[int], axis: int = 0) -> list[Tree]:
    """Cut each array of a tree along an axis into views of these lengths."""
    leaves, structure = flatten(tree)
    places = _places(tuple(lengths), axis)
    columns: list[list] = []
    for leaf in leaves:
        if leaf is None:  # a gradient of integers
            columns.append([None] * len(places))
        else:
            columns.append([leaf[place] for place in places])
    if structure is None:
        return columns[0]
    return [unflatten(parts, structure) for parts in zip(*columns)]


@lru_cache(maxsize=64)
def _places(lengths: tuple[int, ...], axis: int) -> list[tuple[slice, ...]]:
    places = []
    stop = 0
    for length in lengths:
        start = stop
        stop += length
        places.append((*[slice(None)] * axis, slice(start, stop)))
    return places


def cut_as(whole: Tree | list[Tree], pieces: list[Tree], axis: int = 0) -> list[Tree]:
    """Cut gradients of `merge(pieces, axis)` as these lie in it. A list is cut already."""
    if isinstance(whole, list):
        if len(whole) != len(pieces):
            raise ArgumentError(
                "a list of gradients has the wrong length",
                found=len(whole),
                expected=f"{len(pieces)}, as the outputs",
            )
        return [*map(read_only, whole)]
    lengths = [MessageSpec.of(piece).extent(axis) for piece in pieces]
    length = sum(lengths)
    whole = read_only(whole)
    for leaf in flatten(whole)[0]:
        shape = getattr(leaf, "shape", ())
        if leaf is not None and shape[axis : axis + 1] != (length,):
            raise ArgumentError(
                "the gradients do not match the outputs",
                found=f"{type(leaf).__name__} of shape {shape}",
                expected=f"arrays with {length} along axis {axis}, or a list of "
                f"{counted(len(pieces), 'micro-batch')}",
            )
    return cut_along(whole, lengths, axis)


def merge(pieces: Sequence[Tree], axis: int = 0) -> Tree:
    """Put micro-batches together along axis 0, or slices along axis 1."""
    if pieces[0] is None:  # a gradient of integers
        return None
    whole = []
    for column in zip(*(flatten(piece)[0] for piece in pieces)):
        whole.append(None if column[0] is None else arrays.concatenate(column, axis))
    return unflatten(whole, flatten(pieces[0])[1])


def in_order(by_unit: Mapping[int, T]) -> list[T]:
    """Return what belongs to units in the order of these."""
    return [by_unit[unit] for unit in range(len(by_unit))]


class Slicing(NamedTuple):
    """How each micro-batch is cut along axis 1 into slices.

    `lengths` are their positions, by default even ones.
    """

    count: int = 1  # type: ignore[assignment]  # no method of a tuple
    lengths: Sequence[int] | None = None

    def lengths_of(self, spec: MessageSpec) -> Sequence[int]:
        """Return the positions of each slice of a micro-batch."""
        positions = spec.extent(1)
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
        return self.lengths or [*map(len, even_split(positions, self.count))]

    def units(self, tree: Tree, spec: MessageSpec) -> list[Tree]:
        """Return the units of a micro-batch, read-only and contiguous."""
        if self.count == 1:
            return [tree]
        slices = cut_along(tree, self.lengths_of(spec), 1)
        return [read_only(arrays.in_c_order(part)) for part in slices]

    def cut_as(self, gradients: Tree | list[Tree], units: list[Tree]) -> list[Tree]:
        """Cut gradients of the merged `whole(units)` as the units lie in it."""
        if not units:
            return []
        whole = cut_as(gradients, self.whole(units))
        if self.count == 1:
            return whole
        parts: list[Tree] = []
        for gradient, slices in zip(whole, self._by_microbatch(units)):
            parts += cut_as(gradient, slices, 1)
        return [*map(arrays.in_c_order, parts)]

    def counts(self, counts: Sequence[float], specs: Sequence[MessageSpec]) -> list[float]:
        """Return what each unit counts, by its positions, from what the micro-batches count."""
        of_units = []
        for count, spec in zip(counts, specs):
            lengths = self.lengths_of(spec)
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


# -- The micro-batches of a batch ------------------------------------------------------------------


# By number; without slices a unit is a micro-batch.
Units: TypeAlias = "list[Tree] | AskedBatch"


class Microbatches(NamedTuple):
    """The units of a batch, and the spec and rows of each micro-batch.

    Rows are 0 where the arrays of a micro-batch share no axis of rows. Batches with equal `key`
    have equal specs.
    """

    units: Units
    specs: list[MessageSpec]
    rows: list[int]
    key: object


def split(batch: Tree | list[Tree], microbatches: int, slicing: Slicing) -> Microbatches:
    """Cut a batch along axis 0. A list is cut already, and its entries may have any shapes.

    On the host units are read-only views of the user's arrays, of numpy.ndarray itself where those
    are of a subclass, such as numpy.memmap. Raises ArgumentError for a batch that is too small or
    cannot be sent.
    """
    if isinstance(batch, list):
        if len(batch) != microbatches:
            raise ArgumentError(
                "a list of micro-batches has the wrong length",
                found=len(batch),
                expected=f"{microbatches}, as in the schedule",
            )
        trees = [*map(read_only, batch)]
        specs = []
        rows = []
        for number, tree in enumerate(batch):
            try:
                spec = MessageSpec.of(tree)
                specs.append(spec)
                rows.append(spec.rows)
            except ArgumentError as error:
                error.microbatch = number
                raise
        key: object = tuple(specs)
    else:
        key = MessageSpec.of(batch), microbatches
        specs, rows = _specs(*key)
        trees = [read_only(batch)]
        if microbatches > 1:
            trees = cut_along(trees[0], rows)
    if slicing.count > 1:
        units: list[Tree] = []
        for tree, spec in zip(trees, specs):
            units += slicing.units(tree, spec)
        trees = units
    return Microbatches(trees, specs, rows, key)


@lru_cache(maxsize=64)
def _specs(whole: MessageSpec, microbatches: int) -> tuple[list[MessageSpec], list[int]]:
    """The specs of the micro-batches of a batch, and their rows."""
    if microbatches == 1:  # nothing is cut
        return [whole], [whole.rows]
    rows = whole.extent(0)
    if rows < microbatches:
        raise ArgumentError(
            "the batch is smaller than the number of micro-batches",
            found=counted(rows, "row"),
            expected=f"at least {microbatches}",
            remedy="use a bigger batch, or a schedule with fewer micro-batches",
        )
    row_counts = [*map(len, even_split(rows, microbatches))]
    by_rows = {count: whole.with_rows(count) for count in {*row_counts}}
    return [by_rows[count] for count in row_counts], row_counts


@dataclass(eq=False)
class AskedBatch:
    """The units of micro-batches that a user's function gives, each when it is asked for.

    The first is asked for at once: the ranks agree on its shapes, and all others must have the
    same. A micro-batch is asked for with its first slice, and kept to its last: on each stage the
    slices of a sequence are taken in rising order.
    """

    name: str
    function: Callable[[int], Tree]
    rank: int
    slicing: Slicing
    spec: MessageSpec | None = None  # micro-batch 0 sets it
    # By micro-batch the units that are not yet given, the next one last.
    left: dict[int, list[Tree]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left[0] = self._ask(0)

    def __getitem__(self, unit: int) -> Tree:
        microbatch = unit // self.slicing.count
        if microbatch not in self.left:
            self.left[microbatch] = self._ask(microbatch)
        units = self.left[microbatch]
        tree = units.pop()
        if not units:
            del self.left[microbatch]
        return tree

    def _ask(self, microbatch: int) -> list[Tree]:
        """Return the units of a micro-batch, the last one first; errors name it.

        They are read-only copies: the function may fill the same arrays again.
        """
        name = f"{self.name}({microbatch})"
        try:
            tree = self.function(microbatch)
            spec = MessageSpec.of(tree)
            if self.spec is None:
                self.spec = spec
            if spec != self.spec:
                raise ArgumentError(
                    "another shape, dtype or structure than was agreed on at the start of the call",
                    found=spec,
                    expected=f"{self.spec}, by the shapes of micro-batch 0",
                    remedy="give micro-batches of equal shapes, or a list of all of them in place "
                    "of the function",
                )
            return self.slicing.units(read_only(arrays.mapped(arrays.copied, tree)), spec)[::-1]
        except PeerError:
            raise
        except MpipipeError as error:
            error.message = f"{name}: {error.message}"
            error.rank = self.rank
            error.microbatch = microbatch
            raise
        except Exception as error:
            raise StageError(
                f"{name} raised {type(error).__name__}: {error}",
                rank=self.rank,
                microbatch=microbatch,
            ) from error
