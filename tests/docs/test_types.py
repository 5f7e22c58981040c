"""Checkers of types find nothing wrong in the examples, and in the programs of the README and of the pages."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT, job_environment
from support.pages import FILE, blocks_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# a reader's own functions need no annotations: what they call is checked nevertheless
PLAIN = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls"
WRONG = """import mpipipe
from mpipipe import nn, schedules

stage = nn.Stage([nn.Linear(3)])
schedule = schedules.one_f_one_b(ranks=2, microbatches="4")
pipeline = mpipipe.Pipeline([stage], schedule, loss=nn.mean_squared_error, recompute="no")
pipeline.step(None, None).los
mpipipe.train.nothing
mpipipe.nothing
"""


def scripts(folder):
    """Copy all programs to a folder: the examples, and the blocks of pages that are a whole file."""
    found = []
    for example in sorted((ROOT / "docs" / "examples").glob("*.py")):
        found.append(shutil.copy(example, folder))
    for page in PAGES:
        for block in blocks_of(page):
            named = FILE.match(block.text)
            if block.language == "python" and named and "import mpipipe" in block.text:
                path = folder / f"{page.stem.replace('-', '_')}_{block.line}.py"
                path.write_text(f"{PLAIN}\n{block.text.partition(chr(10))[2]}")
                found.append(path)
    return found


def run_mypy(paths, folder):
    # torch and jax may not be there; errors in this package are silent, as in one that is installed
    options = ["--ignore-missing-imports", "--allow-subclassing-any", "--follow-imports", "silent"]
    command = ["mypy", "--strict", "--config-file", "", "--cache-dir", folder / "cache", *options]
    return run(command, paths, folder)


def run_pyright(paths, folder):
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
        # torch and jax may not be there
        "reportMissingImports": False,
        "reportMissingModuleSource": False,
    }
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps({**settings, "include": [Path(path).name for path in paths]}))
    interpreter = ["--pythonpath", sys.executable]
    return run(["basedpyright", "--project", project, *interpreter], [], folder)


def run(command, paths, folder):
    env = job_environment({"MYPYPATH": str(ROOT)})
    return subprocess.run(
        [sys.executable, "-m", *command, *paths], cwd=folder, env=env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.long
@pytest.mark.parametrize("checker, run_checker", [("mypy", run_mypy), ("basedpyright", run_pyright)])
def test_a_checker_passes_every_program_and_sees_what_is_wrong(checker, run_checker, allow_seconds, tmp_path):
    """mypy is strict; basedpyright is pyright, from the package index alone."""
    pytest.importorskip(checker)
    allow_seconds(300)
    paths = scripts(tmp_path)
    assert len(paths) > 20
    done = run_checker(paths, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text(WRONG)
    done = run_checker([tmp_path / "wrong.py"], tmp_path)
    lines = [int(line) for line in re.findall(r"wrong.py:(\d+):.*error", done.stdout)]
    assert sorted(set(lines)) == [4, 5, 6, 7, 8, 9], done.stdout
