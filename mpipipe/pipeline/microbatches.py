"""A batch cut into micro-batches, and outputs of micro-batches put together."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Tree
from mpipipe.arrays.trees import flatten, read_only, unflatten
from mpipipe.comm.transport.sendable import check_sendable
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.wording import counted


def rows_of(tree: Tree) -> int:
    """Return the extent of the first axis, which all leaves share; raises ArgumentError if they do not."""
    leaves = [tree] if type(tree) is np.ndarray else flatten(tree)[0]
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


def split(batch: Tree | list[Tree], microbatches: int) -> tuple[list[Tree], list[int]]:
    """Cut a batch along axis 0; return the micro-batches and the number of rows of each.

    A list is taken as already cut. On the host the micro-batches are read-only views of the user's arrays, and of type
    numpy.ndarray itself where those are of a subclass, such as numpy.memmap.

    Raises ArgumentError when the batch has fewer rows than there are micro-batches, or a list the wrong length, and for
    arrays that cannot be sent (see `check_sendable`).
    """
    if isinstance(batch, list):
        if len(batch) != microbatches:
            raise ArgumentError(
                "a list of micro-batches has the wrong length",
                found=len(batch),
                expected=f"{microbatches}, as in the schedule",
            )
        counts = [rows_of(tree) for tree in batch]
        if min(counts, default=1) < 1:
            raise ArgumentError("an empty micro-batch", found="0 rows", expected="at least 1")
        return [read_only(tree) for tree in batch], counts
    rows = rows_of(batch)
    if rows < microbatches:
        raise ArgumentError(
            "the batch is smaller than the number of micro-batches",
            found=counted(rows, "row"),
            expected=f"at least {microbatches}",
            remedy="use a bigger batch, or a schedule with fewer micro-batches",
        )
    counts, ranges = _ranges(rows, microbatches)
    if type(batch) is np.ndarray:
        view = arrays.read_only(batch)
        return [view[at] for at in ranges], counts
    leaves, structure = flatten(read_only(batch))
    if structure is None:
        return [leaves[0][at] for at in ranges], counts
    return [unflatten([leaf[at] for leaf in leaves], structure) for at in ranges], counts


@lru_cache(maxsize=64)
def _ranges(rows: int, microbatches: int) -> tuple[list[int], list[slice]]:
    """Rows of each micro-batch, and where it lies in the batch."""
    parts = even_split(rows, microbatches)
    return [len(part) for part in parts], [slice(part.start, part.stop) for part in parts]


def merge(pieces: list[Tree]) -> Tree:
    """Put micro-batches together along axis 0."""
    flat = [flatten(piece) for piece in pieces]
    structure = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat))
    return unflatten([arrays.concatenate(column) for column in columns], structure)
