"""The source of the package, read as syntax trees, and searches."""

import ast
import gc
from functools import cache
from pathlib import Path

import mpipipe

PACKAGE = Path(mpipipe.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """{path in the package: syntax tree}; Python's search for garbage among the nodes would take most of the time."""
    gc.disable()
    try:
        paths = sorted(PACKAGE.rglob("*.py"))
        return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}
    finally:
        gc.enable()


@cache
def nodes(tree) -> list[ast.AST]:
    """Each node of a syntax tree; kept, since the walk takes longer than most searches."""
    return list(ast.walk(tree))


def sources():
    """(path in the package, syntax tree) of every file."""
    return trees().items()


def refuse(found):
    assert not found, f"{len(found)} found\n" + "\n".join(found)
