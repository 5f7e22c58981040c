"""Rules that keep the tree of the package such that a reader finds things by guessing: files, folders, faces, names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from support.source import PACKAGE, import_graph, nodes, refuse, trees

pytestmark = pytest.mark.together

SHORTEST = 60  # lines of a file
FILES, FLOORS = 20, 8  # of a folder
# words that hide what is meant
WORDS = re.compile(r"\b(behind|beside|whoever|whom|whose turn|none of|of which|so many|likewise)\b")


@cache
def graph() -> dict[str, dict[str, int]]:
    return import_graph(trees())


def module_of(path: str) -> str:
    return ".".join(["mpipipe", *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def lines_of(path: str) -> int:
    return len((PACKAGE / path).read_text().splitlines())


def importers(of: dict[str, dict[str, int]]) -> dict[str, set[str]]:
    """{module: modules that import it}, but for faces, which import what they show."""
    table = defaultdict(set)
    for module, targets in of.items():
        for target in targets:
            if target.rpartition(".")[0] != module:
                table[target].add(module)
    return table


def floors(of: dict[str, dict[str, int]], folder: str) -> int:
    """The longest chain of imports between the files of a folder, without those of its subfolders."""
    inside = {module: {target for target in targets if folder_of(target) == folder} for module, targets in of.items()}

    @cache
    def height(name):  # imports form no circle
        return 1 + max(map(height, inside[name]), default=0)

    return max((height(name) for name in inside if folder_of(name) == folder), default=0)


def past_the_face(of: dict[str, ast.Module]) -> list[str]:
    """Imports from a file of another room, not from the room or a folder of it: "importer:line -> file"."""
    packages = {module_of(path) for path in of if path.endswith("__init__.py")}
    return [
        f"{path}:{node.lineno} -> {node.module}"
        for path, tree in of.items()
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith("mpipipe.")
        and node.module.count(".") >= 2
        and node.module.split(".")[:2] != module_of(path).split(".")[:2]
        and node.module not in packages
    ]


def class_names(of: dict[str, ast.Module]) -> dict[str, list[str]]:
    """{name: files} of the classes that stand at the top of a module."""
    table = defaultdict(list)
    for path, tree in of.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                table[node.name].append(path)
    return table


def docstrings(tree: ast.Module):
    """(line, text) of every docstring."""
    for node in nodes(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def test_a_short_file_that_one_neighbour_imports_is_part_of_it():
    table = importers(graph())
    short = []
    for path in trees():
        users = table[module_of(path)]
        if lines_of(path) < SHORTEST and not path.endswith("__init__.py") and len(users) == 1:
            (user,) = users
            if folder_of(user) == folder_of(module_of(path)):
                short.append(f"{path} ({lines_of(path)} lines) <- {user}")
    refuse(short)


def test_a_folder_can_be_taken_in_at_a_glance():
    wrong = []
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}):
        name = ".".join(["mpipipe", *folder.relative_to(PACKAGE).parts])
        files, height = len(list(folder.glob("*.py"))), floors(graph(), name)
        if files > FILES or height > FLOORS:
            wrong.append(f"{name}: {files} files, {height} floors")
    refuse(wrong)


def test_a_room_is_imported_through_its_face():
    refuse(past_the_face(trees()))


def test_a_class_name_is_used_once():
    refuse([f"{name}: {', '.join(paths)}" for name, paths in class_names(trees()).items() if len(paths) > 1])


def test_docstrings_use_plain_words():
    refuse(
        [
            f"{path}:{line} {match.group()}"
            for path, tree in trees().items()
            for line, text in docstrings(tree)
            for match in WORDS.finditer(text.split("Examples\n")[0])
        ]
    )


def test_the_searches_find_what_they_look_for():
    texts = {
        "a/__init__.py": "from mpipipe.a.x import f",
        "a/x.py": "from mpipipe.a.y import g\nclass K: 'Stands behind.'",
        "a/y.py": "from mpipipe.a.z import h",
        "a/z.py": "class K: pass",
        "b/__init__.py": "",
        "b/w.py": "from mpipipe.a import f\nfrom mpipipe.a.z import h",
    }
    made = {path: ast.parse(text) for path, text in texts.items()}
    of = import_graph(made)
    assert floors(of, "mpipipe.a") == 3 and floors(of, "mpipipe.b") == 1
    assert past_the_face(made) == ["b/w.py:2 -> mpipipe.a.z"]
    assert importers(of)["mpipipe.a.z"] == {"mpipipe.a.y", "mpipipe.b.w"}
    assert {name: len(paths) for name, paths in class_names(made).items()} == {"K": 2}
    assert [text for _, text in docstrings(made["a/x.py"])] == ["Stands behind."]
