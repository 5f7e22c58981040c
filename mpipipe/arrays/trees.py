"""Arrays, tuples and dicts of arrays ("trees"): taken apart into their arrays ("leaves"), and put together again.

The structure of a tree is None for one array, the number of entries for a tuple, and the tuple of keys for a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mpipipe.arrays.dtypes import is_array
from mpipipe.arrays.types import Array, Tree
from mpipipe.errors import ArgumentError

Structure: TypeAlias = "int | tuple[str, ...] | None"


def flatten(tree: Tree) -> tuple[list, Structure]:
    """Return (leaves, structure); raises ArgumentError for anything but a tree. The leaves are not looked at."""
    if is_array(tree):
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


def unflatten(leaves: Sequence[Array | None], structure: Structure) -> Tree:
    """Return the tree with these leaves."""
    if structure is None:
        return leaves[0]
    if isinstance(structure, int):
        return tuple(leaves)
    return dict(zip(structure, leaves))
