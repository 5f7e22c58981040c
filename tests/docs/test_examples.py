"""Every example runs on four ranks as it stands, and prints what its head says."""

import ast
import textwrap

import pytest
from support.launch import ROOT
from support.printed import check_printed

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
RANKS = 4


def promised(path) -> str:
    """The block after "It prints::" in the head of an example."""
    head = ast.get_docstring(ast.parse(path.read_text()))
    return textwrap.dedent(head.split("It prints::\n\n", 1)[1])


def test_there_are_examples():
    assert len(EXAMPLES) >= 8
    assert {path.stem: libraries(path) for path in EXAMPLES if libraries(path)} == {
        "torch_and_jax": ["torch", "jax"],
        "torch_pipeline": ["torch"],
    }


def libraries(path) -> list[str]:
    """What an example imports that is no dependency."""
    return [name for name in ("torch", "jax") if f"\nimport {name}\n" in path.read_text()]


def to_be_run(path):
    return pytest.param(path, marks=[pytest.mark.judges] if libraries(path) else [], id=path.stem)


@pytest.mark.long
@pytest.mark.parametrize("path", [to_be_run(path) for path in EXAMPLES])
def test_example_prints_what_its_head_says(launch, path):
    for name in libraries(path):
        pytest.importorskip(name)
    job = launch(RANKS, [str(path)], timeout=100)
    assert job.returncode == 0, job.stderr
    check_printed(job.stdout, promised(path))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_has_a_title(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 70
    assert lines[0] == '"""' and set(lines[2]) == {"="} and len(lines[2]) == len(lines[1])
