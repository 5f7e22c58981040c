"""Arrays that more than one owner reads: copies of results that share memory with a received array, and refused writes.

A stage may return what it has received, or a view of it. The mailbox uses the buffers of received arrays again, so such
a result is copied before it is kept or sent. A stage must not write to what it has received: on the host it is handed
read-only views.
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
    buffers = [view for _, (_, view) in leases]
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


def remedy_of(error: Exception) -> str | None:
    """What to do where a stage or a loss has tried to write to an array that it was handed; None for other errors."""
    if not isinstance(error, ValueError) or "read-only" not in str(error):
        return None
    return "copy an array that you were handed (x, dy, targets) before you write to it: it belongs to others, too"
