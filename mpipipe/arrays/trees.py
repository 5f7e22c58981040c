"""Arrays, tuples and dicts of arrays ("trees"), taken apart into arrays ("leaves").

The structure of a tree is None for one array, the number of entries for a tuple, and the tuple of
keys for a dict. Branches are several trees under names, and their structure is a Forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

from mpipipe.arrays.dtypes import Array, Tree, is_array, strip_subclass
from mpipipe.errors import ArgumentError

Structure: TypeAlias = "int | tuple[str, ...] | Forked | None"


@dataclass(frozen=True)
class Forked:
    """The structure of Branches: (name, structure, number of leaves) of each tree.

    The main one is under "".
    """

    parts: tuple[tuple[str, Structure, int], ...]


def flatten(tree: Tree) -> tuple[list, Structure]:
    """Return (leaves, structure); raise ArgumentError for anything but a tree."""
    if is_array(tree):
        return [tree], None
    if isinstance(tree, tuple):
        return list(tree), len(tree)
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ArgumentError(
                "the keys of a dict of arrays", found=list(tree), expected="strings"
            )
        return list(tree.values()), tuple(tree)
    if isinstance(tree, Branches):
        parts = []
        all_leaves: list = []
        for name, item in [("", tree.main), *tree.skips.items()]:
            # a tree without any gradients is None
            leaves, structure = ([None], None) if item is None else flatten(item)
            parts.append((name, structure, len(leaves)))
            all_leaves += leaves
        return all_leaves, Forked(tuple(parts))
    raise ArgumentError(
        "neither an array nor a tuple or dict of arrays",
        found=type(tree).__name__,
        expected="an array of numpy or CuPy, a tuple or a dict of such",
        remedy="convert it with numpy.asarray; a list means one entry per micro-batch",
    )


def read_only(tree: Tree) -> Any:
    """Return an array or a tree with read-only views in place of its host arrays.

    Nothing can protect a device array. Views are of numpy.ndarray itself; a masked array raises
    ArgumentError.
    """
    if isinstance(tree, np.ndarray):
        view = tree.view() if type(tree) is np.ndarray else strip_subclass(tree).view()
        view.setflags(write=False)
        return view
    if isinstance(tree, Branches):  # a main gradient may be None
        skips = {name: read_only(item) for name, item in tree.skips.items()}
        return Branches(read_only(tree.main), **skips)
    if isinstance(tree, (dict, tuple)):
        return mapped(read_only, tree)
    return tree


def unflatten(leaves: Sequence[Array | None], structure: Structure) -> Tree:
    """Return the tree with these leaves."""
    if structure is None:
        return leaves[0]
    if isinstance(structure, int):
        return tuple(leaves)
    if isinstance(structure, Forked):
        trees = {}
        start = 0
        for name, inner, count in structure.parts:
            trees[name] = unflatten(leaves[start : start + count], inner)
            start += count
        return Branches(trees.pop(""), **trees)
    return dict(zip(structure, leaves))


def mapped(function: Callable[[Array], Any], tree: Tree) -> Tree:
    """Return a tree with a function of each leaf in its place; named tuples stay what they are."""
    if tree is None:  # no gradients
        return None
    if isinstance(tree, Branches):
        skips = {name: mapped(function, item) for name, item in tree.skips.items()}
        return Branches(mapped(function, tree.main), **skips)
    leaves, structure = flatten(tree)
    result = unflatten([function(leaf) for leaf in leaves], structure)
    if hasattr(tree, "_make"):
        return tree._make(result)
    return result


@dataclass(init=False, slots=True, eq=False)
class Branches:
    """Results, or arguments, of a stage with skips (`schedules.with_skips`) or side inputs.

    A stage that sends skips returns a Branches from `forward`, and receives one with the gradients
    in `backward`. A stage that receives skips gets one in `forward`, and returns one with the
    gradients from `backward`. The inputs of a pipeline may be one too: layers take arrays from it
    by name (see nn.Join).

    Parameters
    ----------
    main : array, tuple or dict of arrays
        What goes to the next stage, or comes from the one before; of gradients the other way.
    **skips : array, tuple or dict of arrays
        For each skip of the stage what goes over it, by its name: `branches["residual"]`, or
        `branches.skips`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import Branches
    >>> branches = Branches(np.ones(3), residual=np.zeros(2))
    >>> branches.main, branches["residual"]
    (array([1., 1., 1.]), array([0., 0.]))
    """

    main: Tree
    skips: dict[str, Tree]

    def __init__(self, main: Tree, /, **skips: Tree) -> None:
        self.main = main
        self.skips = skips

    def __getitem__(self, name: str) -> Tree:
        return self.skips[name]


def named_leaves(
    value: object, name: str, above: tuple[int, ...] = (), grown: bool = True
) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of arrays in containers and dataclasses: ("x['mask']", array).

    Without `grown`, those of a dataclass are left out whose attribute `grows` says that they are
    written to bit by bit.
    """
    if is_array(value):
        yield name, value
        return
    inner: list[tuple[str, object]] = []
    if id(value) in above:
        return
    if isinstance(value, Mapping):
        inner = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = [(f"{name}.{key}", item) for key, item in zip(value._fields, value)]
    elif isinstance(value, (tuple, list)):
        inner = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        if grown or not getattr(value, "grows", False):
            for field in fields(value):
                inner.append((f"{name}.{field.name}", getattr(value, field.name, None)))
    for key, item in inner:
        yield from named_leaves(item, key, (*above, id(value)), grown)
