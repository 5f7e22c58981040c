"""What a stage returns may share memory with what it received; such memory is used again, so its content is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import flatten, unflatten
from mpipipe.comm.mailbox import Lease


def copy_if_aliased(tree: Tree, leases: Lease) -> Tree:
    """Return `tree` with a copy of each leaf that shares memory with a received array, whose buffer is used again."""
    if type(tree) is np.ndarray and tree.base is None:  # owns its memory, as no received array on the host does
        return tree
    if tree is None:
        return None
    buffers = [array for _, array in leases]
    if arrays.is_array(tree):
        return arrays.copy(tree) if _shares_memory(tree, buffers) else tree
    leaves, structure = flatten(tree)
    if not any(_shares_memory(leaf, buffers) for leaf in leaves):
        return tree
    return unflatten([arrays.copy(leaf) if _shares_memory(leaf, buffers) else leaf for leaf in leaves], structure)


def _shares_memory(leaf: Array | None, buffers: Sequence[Array]) -> bool:
    if leaf is None or (isinstance(leaf, np.ndarray) and leaf.base is None):
        return False
    return any(arrays.shares_memory(leaf, buffer) for buffer in buffers)
