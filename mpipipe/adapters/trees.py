"""What goes into a module or function and comes out, with skips or without, and the gradients of both.

    pipeline      x, or Branches(x, far=..., wide=...)      y, or Branches(y, far=...)
    parts         [x, far, wide]                            [y, far]
    function      f(x, far, wide), f(*x, far, wide) or      y, or (y, far)
                  f(far, wide, **x)

Each part is a tree of its own: an array, or a tuple or dict of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Branches, Structure, Tree, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position, random_key

KINDS = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64")  # of parameters
Structures: TypeAlias = "tuple[Structure, ...]"  # of the parts


def skip_names(given: Sequence[str], what: str) -> tuple[str, ...]:
    """Return names of skips as a tuple; raises ArgumentError for one text, and for what is no text."""
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ArgumentError(what, found=repr(given), expected='a tuple of names of skips, such as ("far",)')
    return tuple(given)


class Tape(NamedTuple):
    """What the forward of a micro-batch leaves for its backward."""

    kept: Any  # of the library
    structures: Structures  # of the parts of the input
    floating: tuple[bool, ...]  # which of their arrays take gradients
    output: Structures  # the same of the output
    differentiable: tuple[bool, ...]


class TreeStage:
    """What the stages of both libraries have in common: parts as lists of arrays, and what others ask of a stage.

    A pipeline sets the number `index`, and `ends`: whether the gradient of the input is not asked for. Optimizers call
    `before_write` before they write parameters. A library has its own four functions, of lists of arrays, and a context
    in which they run.
    """

    _computing: Callable[[], AbstractContextManager[Any]]
    _forward: Callable[[list[Array], Structures, Position], tuple[list[Array], Structures, Tape | None]]
    _backward: Callable[[list[Array | None], Tape], Sequence[Array]]
    _backward_input: Callable[[list[Array | None], Tape], tuple[Sequence[Array], Any]]
    _backward_weight: Callable[[Any], None]

    def __init__(self, maker: str, seed: int = 0, gives: Sequence[str] = (), takes: Sequence[str] = ()) -> None:
        self.seed = seed
        self.gives, self.takes = skip_names(gives, f"gives of {maker}"), skip_names(takes, f"takes of {maker}")
        self.takes_branches = bool(self.gives or self.takes)  # else one tree in, one tree out
        self.index: int | None = None
        self.ends = False
        self.before_write: list[Callable[[], object]] = []

    def key(self, library: str, position: Position) -> np.ndarray:
        """Return the words for random numbers of this place: the same in a recomputation, others everywhere else."""
        return random_key(library, self.seed, self.index, position.step, position.microbatch, position.replica)

    def forward(self, x: Tree | Branches, position: Position | None = None) -> tuple[Tree | Branches, Tape | None]:
        """Compute the output of one micro-batch, and in a training step what its backward needs."""
        with self._computing():
            leaves, structures = flatten_parts(parts_of(x, self.takes))
            found, output, saved = self._forward(leaves, structures, Position() if position is None else position)
            return _tree_of(found, output, self.gives), saved

    def backward(self, dy: Tree | Branches, saved: Tape) -> Tree | Branches:
        """Add to the gradients of the parameters, and return the gradient of the input."""
        with self._computing():
            return self._of_input(self._backward(self._slopes(dy, saved), saved), saved)

    def backward_input(self, dy: Tree | Branches, saved: Tape) -> tuple[Tree | Branches, Any]:
        """Return the gradient of the input, and what `backward_weight` needs."""
        with self._computing():
            found, pending = self._backward_input(self._slopes(dy, saved), saved)
            return self._of_input(found, saved), pending

    def backward_weight(self, pending: Any) -> None:
        """Add to the gradients of the parameters."""
        with self._computing():
            self._backward_weight(pending)

    def _slopes(self, dy: Tree | Branches, saved: Tape) -> list[Array | None]:
        """The gradients of those arrays of the output that have them."""
        parts = zip(parts_of(dy, self.gives), saved.output)
        leaves = [leaf for part, structure in parts for leaf in _leaves_like(part, structure)]
        return [leaf for leaf, has in zip(leaves, saved.differentiable) if has]

    def _of_input(self, found: Sequence[Array], saved: Tape) -> Tree | Branches:
        """The gradient of the input, with None for an array that has none."""
        source = iter(found)
        return _tree_of([next(source) if has else None for has in saved.floating], saved.structures, self.takes)


def one_dtype(names: Mapping[str, str], what: str, remedy: str) -> np.dtype:
    """Return the dtype of all parameters, of (dtype: name of one that has it); raises ArgumentError for another one."""
    if len(names) > 1 or not names.keys() <= {*KINDS}:
        raise ArgumentError(
            f"the parameters of a {what} must have one dtype, since they lie in one array",
            found=", ".join(f"{kind} ({name})" for kind, name in names.items()),
            expected=f"one of {', '.join(KINDS)}",
            remedy=remedy,
        )
    return arrays.dtype(next(iter(names)))


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


def _tree_of(leaves: Sequence[Any], structures: Structures, names: Sequence[str]) -> Tree | Branches:
    """Return arrays as a pipeline takes them."""
    main, *skips = unflatten_parts(leaves, structures)
    return Branches(main, **dict(zip(names, skips))) if names else main


def returned(output: Any, names: Sequence[str]) -> Sequence[Any]:
    """Return the parts of what a module or function returned, which gives over skips with these names."""
    if not names:
        return [output]
    several = isinstance(output, (tuple, list))
    if not several or len(output) != 1 + len(names):
        raise ArgumentError(
            "the output of a module or function that gives over skips",
            found=type(output).__name__ + (f" of {len(output)}" if several else ""),
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


def _leaves_like(tree: Tree | None, structure: Structure) -> list[Array | None]:
    """Return the gradients for arrays of a structure, in their order; one array without a gradient is None."""
    nothing: tuple[list, Structure] = [None], None
    leaves, there = nothing if tree is None else flatten(tree)
    if isinstance(structure, tuple) and isinstance(there, tuple) and {*structure} == {*there}:
        by_name = dict(zip(there, leaves))
        return [by_name[name] for name in structure]
    if there != structure:
        raise ArgumentError(
            "the gradient of an output has another structure than the output", found=there, expected=structure
        )
    return leaves
