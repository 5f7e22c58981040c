"""Copies of results that share memory with a received array.

A stage may return what it has received, or a view of it. The mailbox uses the buffers of received arrays again, so such
a result is copied before it is kept or sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import flatten, unflatten
from mpipipe.comm.mailbox import Lease


def copy_if_aliased(tree: Tree, leases: Lease) -> Tree:
    """Return `tree`, with a copy in place of each leaf that shares memory with an array of `leases`."""
    if type(tree) is np.ndarray and tree.base is None:  # it owns its memory, and a received array on the host does not
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
