"""What goes into a module or function and comes out, with skips or without, and the gradients of both.

    pipeline      x, or Branches(x, far=..., wide=...)      y, or Branches(y, far=...)
    parts         [x, far, wide]                            [y, far]
    function      f(x, far, wide), f(*x, far, wide) or      y, or (y, far)
                  f(far, wide, **x)

Each part is a tree of its own: an array, or a tuple or dict of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpipipe.arrays import Array, Branches, Structure, Tree, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position, random_key

Structures: TypeAlias = "tuple[Structure, ...]"  # of the parts


def skip_names(given: Sequence[str], what: str) -> tuple[str, ...]:
    """Return names of skips as a tuple; raises ArgumentError for one text, and for what is no text."""
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ArgumentError(what, found=repr(given), expected='a tuple of names of skips, such as ("far",)')
    return tuple(given)


class TreeStage:
    """What the stages of both libraries have in common: the names of skips, and what pipelines and optimizers ask for.

    A pipeline sets the number `index`, and `ends`: whether nobody asks for the gradient of the input. Optimizers call
    `before_write` before they write parameters.
    """

    def __init__(self, maker: str, seed: int, gives: Sequence[str], takes: Sequence[str]) -> None:
        self.seed = seed
        self.gives, self.takes = skip_names(gives, f"gives of {maker}"), skip_names(takes, f"takes of {maker}")
        self.takes_branches = bool(self.gives or self.takes)  # else one tree in, one tree out
        self.index: int | None = None
        self.ends = False
        self.before_write: list[Callable[[], object]] = []

    def key(self, library: str, position: Position) -> np.ndarray:
        """Return the words for random numbers of this place: the same in a recomputation, others everywhere else."""
        return random_key(library, self.seed, self.index, position.step, position.microbatch, position.replica)


def parts_of(tree: Tree | Branches, names: Sequence[str]) -> list[Tree]:
    """Return the parts of what a pipeline hands over; raises ArgumentError unless its skips have these names."""
    found = tree.skips if isinstance(tree, Branches) else {}
    if {*found} != {*names}:
        raise ArgumentError(
            "the skips of a stage are others than it was made for",
            found=", ".join(found) or "no skips",
            expected=", ".join(names) or "no skips",
            remedy="give torch_stage or jax_stage the names of its skips in the schedule: gives=(...), takes=(...)",
        )
    return [tree.main, *(found[name] for name in names)] if isinstance(tree, Branches) else [tree]


def tree_of(parts: Sequence[Tree], names: Sequence[str]) -> Tree | Branches:
    """Return parts as a pipeline takes them."""
    return Branches(parts[0], **dict(zip(names, parts[1:]))) if names else parts[0]


def returned(output: Any, names: Sequence[str]) -> Sequence[Any]:
    """Return the parts of what a module or function returned, which gives over skips with these names."""
    if not names:
        return [output]
    if not isinstance(output, (tuple, list)) or len(output) != 1 + len(names):
        found = (
            f"{type(output).__name__} of {len(output)}" if isinstance(output, (tuple, list)) else type(output).__name__
        )
        raise ArgumentError(
            "the output of a module or function that gives over skips",
            found=found,
            expected=f"a tuple of {1 + len(names)}: (y, {', '.join(names)})",
        )
    return output


def applied(function: Callable[..., Any], first: Sequence[Any], parts: Sequence[Any], **options: Any) -> Any:
    """Return what a function returns for these parts, after arguments that come first."""
    main, *taken = parts
    if isinstance(main, dict):
        return function(*first, *taken, **main, **options)
    return function(*first, *(main if isinstance(main, tuple) else (main,)), *taken, **options)


def flatten_parts(
    parts: Sequence[Any], of: Callable[[Any], tuple[list, Structure]] = flatten
) -> tuple[list, Structures]:
    """Return the arrays of all parts, one after the other, and the structure of each."""
    found = [of(part) for part in parts]
    return [leaf for leaves, _ in found for leaf in leaves], tuple(structure for _, structure in found)


def unflatten_parts(leaves: Sequence[Any], structures: Structures) -> list[Tree]:
    """Return the parts with these arrays."""
    source = iter(leaves)
    counts = [len(each) if isinstance(each, tuple) else each if isinstance(each, int) else 1 for each in structures]
    return [unflatten([next(source) for _ in range(n)], each) for n, each in zip(counts, structures)]


def gradient_leaves(
    gradient: Tree | Branches | None, structures: Structures, names: Sequence[str]
) -> list[Array | None]:
    """Return the gradients for arrays of these structures, in their order, whatever the order of keys.

    Raises ArgumentError if they have another structure. One array without a gradient is None.
    """
    parts = parts_of(gradient, names)
    return [leaf for part, structure in zip(parts, structures) for leaf in _leaves_like(part, structure)]


def _leaves_like(tree: Tree | None, structure: Structure) -> list[Array | None]:
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
