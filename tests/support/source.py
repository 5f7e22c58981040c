"""The source of the package, read as syntax trees: who imports whom, and searches."""

from __future__ import annotations

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


def imported(tree, module, is_package, modules):
    """(line, module) of each import of one of the modules, in functions and below `if TYPE_CHECKING` too."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    left = [tree]
    while left:
        node = left.pop()
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
            base = base if node.level else node.module
            for alias in node.names:
                found = f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
                if found in modules:
                    yield node.lineno, found


def import_graph(trees):
    """{module: {imported module: line}} of {path in the package: syntax tree}."""
    names = {path: ".".join(["mpipipe", *Path(path).with_suffix("").parts]) for path in trees}
    modules = {path: name.removesuffix(".__init__") for path, name in names.items()}
    graph = {}
    for path, tree in trees.items():
        lines = imported(tree, modules[path], path.endswith("__init__.py"), set(modules.values()))
        graph[modules[path]] = {module: line for line, module in lines if module != modules[path]}
    return graph


def findings(search):
    """["path:line", ...] of what a search of a syntax tree finds in the package."""
    return [f"{name}:{found}" for name, tree in sources() for found in search(tree)]


def refuse(found):
    assert not found, f"{len(found)} found\n" + "\n".join(found)
