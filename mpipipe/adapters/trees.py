"""Trees of gradients, laid beside the trees that they belong to."""

from __future__ import annotations

from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Structure, flatten
from mpipipe.errors import ArgumentError


def leaves_like(tree: Tree | None, structure: Structure) -> list[Array | None]:
    """Return the arrays of a tree of gradients in the order of `structure`, whatever the order of its keys.

    Raises ArgumentError if it has another structure. One array without a gradient is None.
    """
    if tree is None:
        found: list[Array | None] = [None]
        return found if structure is None else _refuse(None, structure)
    leaves, there = flatten(tree)
    if isinstance(structure, tuple) and isinstance(there, tuple) and {*structure} == {*there}:
        by_name = dict(zip(there, leaves))
        return [by_name[name] for name in structure]
    return leaves if there == structure else _refuse(there, structure)


def _refuse(found: Structure, expected: Structure) -> list[Array | None]:
    raise ArgumentError(
        "the gradient of an output has another structure than the output", found=found, expected=expected
    )
