"""What a stage with skips returned, taken apart: the tree for the chain of stages, and one tree for each skip."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.arrays import Tree
from mpipipe.arrays.trees import Branches
from mpipipe.errors import StageError
from mpipipe.pipeline.plan import Port


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
