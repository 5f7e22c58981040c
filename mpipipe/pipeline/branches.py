"""What goes into and comes out of a stage with skips: the tree for the chain of stages, and one tree for each skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpipipe.arrays import Tree
from mpipipe.errors import StageError
from mpipipe.pipeline.plan import Port


@dataclass(init=False, slots=True, eq=False)
class Branches:
    """Several results, or several arguments, of a stage with skips (`schedules.with_skips`).

    The forward of a stage that gives over skips returns one, and its backward gets one, with the gradients. The forward
    of a stage that takes over skips gets one, and its backward returns one.

    Parameters
    ----------
    main : array, tuple or dict of arrays
        What goes to the next stage, or comes from the one before; of gradients the other way.
    **skips : array, tuple or dict of arrays
        For each skip of the stage what goes over it, by its name.

    Attributes
    ----------
    main : array, tuple or dict of arrays
        The same.
    skips : dict of str to array, tuple or dict of arrays
        The same; `branches["residual"]` is short for `branches.skips["residual"]`.

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
        self.main, self.skips = main, skips

    def __getitem__(self, name: str) -> Tree:
        return self.skips[name]


def parted(result: Tree | Branches, ports: Sequence[Port], what: str) -> tuple[Tree, dict[str, Tree]]:
    """Take what a stage returned apart: (tree for the chain, name -> tree for each skip that wants one).

    Raises StageError if one of these is missing, or one is there that the stage does not have.

    Parameters
    ----------
    result : of the stage
    ports : its skips on this side
    what : the action
    """
    main, given = (result.main, result.skips) if type(result) is Branches else (result, {})
    wanted = {port.name for port in ports if port.wanted}
    if not wanted <= {*given} or not {*given} <= {port.name for port in ports}:
        there = ", ".join(given)
        raise StageError(
            f"the {what} of a stage does not give what its skips want",
            found=f"Branches with {there or 'no skips'}" if type(result) is Branches else type(result).__name__,
            expected=f"mpipipe.Branches with {', '.join(sorted(wanted))}" if wanted else "no skips",
            remedy="return Branches(tree, name=tree) with a tree for each skip of schedules.with_skips, and no other",
        )
    return main, {name: tree for name, tree in given.items() if name in wanted}
