"""Checkers of types find nothing wrong in the examples, and in the programs of the README and of the pages."""

import shutil
import subprocess
import sys

import pytest
from support.launch import ROOT, job_environment
from support.pages import FILE, blocks_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# a reader's own functions need no annotations: what they call is checked nevertheless
PLAIN = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls"
# what Python allows and mypy does not follow without annotations, and the kind of error that it then gives
EASED = {
    "class Scale:": "attr-defined, arg-type",  # a list of two classes becomes a list of objects
    "over_batch = True": "attr-defined",  # a function gets an attribute
    "inputs if stages.is_first else None": "assignment",  # a variable gets None as well
    "task.validation(0, range(4), None)": "arg-type",  # a task that asks for no shard
}
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
                codes = ", ".join(codes for text, codes in EASED.items() if text in block.text)
                eased = f', disable-error-code="{codes}"' if codes else ""
                path.write_text(f"{PLAIN}{eased}\n{block.text.partition(chr(10))[2]}")
                found.append(path)
    return found


def check(paths, folder):
    # torch and jax may not be there; errors in this package are silent, as in one that is installed
    options = ["--ignore-missing-imports", "--allow-subclassing-any", "--follow-imports", "silent"]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", folder / "cache"]
    env = job_environment({"MYPYPATH": str(ROOT)})
    return subprocess.run(
        [*command, *options, *paths], cwd=folder, env=env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.long
def test_mypy_strict_passes_on_every_program_and_sees_what_is_wrong(allow_seconds, tmp_path):
    pytest.importorskip("mypy")
    allow_seconds(300)
    paths = scripts(tmp_path)
    assert len(paths) > 20
    done = check(paths, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text(WRONG)
    done = check([tmp_path / "wrong.py"], tmp_path)
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert sorted(set(lines)) == [4, 5, 6, 7, 8, 9], done.stdout
