"""Arrays, tuples and dicts of arrays: taken apart into leaves, cut into micro-batches, put together again.

A "tree" is one array, a tuple of arrays or a dict of arrays. Its structure is None for an array, the number of
entries for a tuple, and the tuple of keys for a dict.
"""

from __future__ import annotations

import json

import numpy as np

from mpipipe import arrays
from mpipipe.comm.transport.sendable import check_sendable
from mpipipe.errors import ArgumentError


def flatten(tree):
    """(leaves, structure) of a tree. Raises ArgumentError for anything else."""
    if arrays.is_array(tree):
        return [tree], None
    if isinstance(tree, tuple):
        return list(tree), len(tree)
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ArgumentError("the keys of a dict of arrays", found=list(tree), expected="strings")
        return list(tree.values()), tuple(tree)
    raise ArgumentError(
        "neither an array nor a tuple or dict of arrays",
        found=type(tree).__name__,
        expected="an array of numpy or CuPy, a tuple or a dict of such",
        remedy="convert it with numpy.asarray; a list means one entry per micro-batch",
    )


def unflatten(leaves, structure):
    """The tree with these leaves."""
    if structure is None:
        return leaves[0]
    if isinstance(structure, int):
        return tuple(leaves)
    return dict(zip(structure, leaves))


def partition_rows(rows: int, microbatches: int) -> list[int]:
    """Rows of each micro-batch: sizes differ by one at most, the bigger ones first."""
    size, bigger = divmod(rows, microbatches)
    return [size + (m < bigger) for m in range(microbatches)]


def rows_of(tree) -> int:
    """Extent of the first axis, which all leaves share."""
    leaves, _ = flatten(tree)
    for leaf in leaves:
        check_sendable(leaf)
    counts = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(counts) != 1 or -1 in counts:
        raise ArgumentError(
            "the arrays of a batch do not share their first axis",
            found=f"shapes {[leaf.shape for leaf in leaves]}",
            expected="the same number of rows in each, and at least one axis",
        )
    return counts.pop()


def split(batch, microbatches: int) -> list:
    """Cut a batch along axis 0 into micro-batches; a list is taken as already cut.

    On the host they are views of the user's arrays that cannot be written to, and of type numpy.ndarray itself where
    those are of a subclass, such as numpy.memmap.

    Raises ArgumentError when the batch has fewer rows than there are micro-batches, or a list the wrong length, and for
    arrays that cannot travel (see `transport.check_sendable`).
    """
    if isinstance(batch, list):
        if len(batch) != microbatches:
            raise ArgumentError(
                "a list of micro-batches has the wrong length",
                found=len(batch),
                expected=f"{microbatches}, as in the schedule",
            )
        for tree in batch:
            if rows_of(tree) < 1:
                raise ArgumentError("an empty micro-batch", found="0 rows", expected="at least 1")
        return [_lent(tree) for tree in batch]
    rows = rows_of(batch)
    if rows < microbatches:
        raise ArgumentError(
            "the batch is smaller than the number of micro-batches",
            found=f"{rows} rows",
            expected=f"at least {microbatches}",
            remedy="use a bigger batch, or a schedule with fewer micro-batches",
        )
    leaves, structure = flatten(_lent(batch))
    pieces, start = [], 0
    for count in partition_rows(rows, microbatches):
        pieces.append(unflatten([leaf[start : start + count] for leaf in leaves], structure))
        start += count
    return pieces


def _lent(tree):
    """Views of the arrays of a tree that a stage or loss can read, and not write to: they are the user's.

    Device arrays as they are, since they cannot be protected.
    """
    leaves, structure = flatten(tree)
    return unflatten([leaf if arrays.is_device(leaf) else _read_only(leaf) for leaf in leaves], structure)


def _read_only(array):
    view = arrays.plain(array).view()
    view.flags.writeable = False
    return view


def merge(pieces: list):
    """Put micro-batches together along axis 0."""
    taken = [flatten(piece) for piece in pieces]
    structure = taken[0][1]
    columns = zip(*(leaves for leaves, _ in taken))
    return unflatten([arrays.concatenate(column) for column in columns], structure)


class MessageSpec:
    """What travels over an edge for one micro-batch: structure, (shape, dtype) of each leaf, which have gradients."""

    __slots__ = ("floating", "gradients", "leaves", "structure")

    def __init__(self, structure, leaves):
        self.structure = structure
        self.leaves = tuple(leaves)
        self.floating = [arrays.is_floating(kind) for _, kind in self.leaves]
        self.gradients = tuple(leaf for leaf, floating in zip(self.leaves, self.floating) if floating)

    @classmethod
    def of(cls, tree):
        """The wire that `tree` needs; raises ArgumentError where a leaf cannot travel."""
        leaves, structure = flatten(tree)
        for leaf in leaves:
            check_sendable(leaf)
        return cls(structure, [(leaf.shape, leaf.dtype) for leaf in leaves])

    def __eq__(self, other):
        return (self.structure, self.leaves) == (other.structure, other.leaves)

    def matches(self, tree) -> bool:
        """Whether `tree` is what this wire carries and can be sent as it is."""
        if self.structure is None:  # the common case, on the hot path
            ((shape, kind),) = self.leaves
            alike = arrays.is_array(tree) and tree.shape == shape and tree.dtype == kind
            return alike and tree.flags.c_contiguous and not isinstance(tree, np.ma.MaskedArray)
        return MessageSpec.of(tree) == self

    def __str__(self):
        return ", ".join(f"{kind.name}{list(shape)}" for shape, kind in self.leaves)

    def encode(self) -> bytes:
        """As the content of a header message."""
        return json.dumps([self.structure, [[kind.name, shape] for shape, kind in self.leaves]]).encode()

    @classmethod
    def decode(cls, content: bytes):
        structure, leaves = json.loads(content)
        if isinstance(structure, list):
            structure = tuple(structure)
        return cls(structure, [(tuple(shape), arrays.dtype(name)) for name, shape in leaves])

    def gradient_tree(self, received):
        """Gradients in the structure of the activation, None where a leaf has none."""
        source = iter(received)
        return unflatten([next(source) if floating else None for floating in self.floating], self.structure)

    def gradient_leaves(self, tree) -> list:
        """The arrays to send back for this activation; raises ArgumentError where shape or dtype differ."""
        if self.structure is None and self.gradients and self.matches(tree):
            return [tree]
        leaves, structure = ([tree], None) if tree is None else flatten(tree)
        if structure != self.structure:
            raise ArgumentError(
                "an input gradient has another structure than the input", found=structure, expected=self.structure
            )
        wanted = [leaf for leaf, floating in zip(leaves, self.floating) if floating]
        for leaf, (shape, kind) in zip(wanted, self.gradients):
            if leaf is None or leaf.shape != shape or leaf.dtype != kind:
                raise ArgumentError(
                    "an input gradient does not match its input",
                    found="None" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}",
                    expected=f"{kind.name}{list(shape)}",
                )
            check_sendable(leaf)
        return wanted
