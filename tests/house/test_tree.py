"""Rules that keep the tree of the package such that a reader finds things by guessing: files, folders, faces, names."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from support.source import PACKAGE, nodes, refuse, trees

pytestmark = pytest.mark.together

# words that hide what is meant
WORDS = re.compile(r"\b(behind|beside|whoever|whom|whose turn|none of|of which|so many|likewise)\b")


def module_of(path: str) -> str:
    return ".".join(["mpipipe", *Path(path).with_suffix("").parts]).removesuffix(".__init__")


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


def test_a_folder_can_be_taken_in_at_a_glance():
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 20, folder


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


COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp)


def nested(tree: ast.Module) -> list[int]:
    """Lines of a comprehension within another, and of a conditional expression within another."""
    lines = []
    for kinds in (COMPREHENSIONS, ast.IfExp):
        for node in nodes(tree):
            if isinstance(node, kinds) and any(isinstance(each, kinds) for each in list(ast.walk(node))[1:]):
                lines.append(node.lineno)
    return lines


def test_no_comprehension_and_no_conditional_stands_within_another():
    refuse([f"{path}:{line}" for path, tree in trees().items() for line in nested(tree)])


def test_the_comment_of_a_statement_of_several_lines_stands_above_it():
    """After its closing bracket nobody reads it, and `ruff format` breaks the line for it."""
    comment = re.compile(r"^\s*[])}].*  # (?!type:|fmt:|noqa)")
    refuse(
        [
            f"{path.relative_to(PACKAGE)}:{number}"
            for path in sorted(PACKAGE.rglob("*.py"))
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if comment.match(line)
        ]
    )


def test_statements_say_most_of_what_is_done_and_annotations_what_a_thing_is():
    """What stands within a statement a reader must take apart; `object` says that a thing is only passed on."""
    thousands = sum(path.read_text().count("\n") for path in PACKAGE.rglob("*.py")) / 1000
    every = [node for tree in trees().values() for node in nodes(tree)]
    assert sum(isinstance(node, COMPREHENSIONS) for node in every) <= 12 * thousands
    assert sum(isinstance(node, ast.IfExp) for node in every) <= 10 * thousands
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in every) <= 300
