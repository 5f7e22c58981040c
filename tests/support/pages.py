"""The blocks of code of a page, and a reader who runs them in order in a fresh checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from support.launch import ROOT, job_environment, mpiexec
from support.printed import check_printed

FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.(?:py|toml))\n")  # the first line of a block that is a file
RUN, SHOWN = ("bash", "python", "toml", "output"), ("text", "py")
SECONDS = 100  # for one block

# A reader runs these as they stand. A test has no time for all of their work, so it takes a small part of it.
LESS = r"""
case "$*" in
    *waves*|*shift.py*)  # a tenth of the steps
        exec "$PYTHON3" $(sed -E 's/(--steps|--save-every) ([0-9]+)0( |$)/\1 \2\3/g' <<< "$*") ;;
    "-m pip install h5py") exit 0 ;;
    *"docs/tasks/weather.py weather.h5") exec "$PYTHON3" "$@" ;;
    *docs/tasks/weather.py*) exec "$PYTHON3" "$@" --steps 2 ;;
    *docs/tasks/darcy.py*) exec "$PYTHON3" "$@" --steps 2 --set samples=64 ;;
    "-m mpipipe plan --dim 64 --layers 3"*) exec "$PYTHON3" "$@" --batch 2 ;;
    "-m mpipipe train --plan auto"*)
        exec "$PYTHON3" "$@" --steps 2 --eval-batches 1 --sample-bytes 0 --seq-len 16 --batch 8 --data "$DATA" ;;
    "-m mpipipe train"*) exec "$PYTHON3" "$@" --steps 2 --eval-batches 1 --sample-bytes 0 --seq-len 32 --data "$DATA" ;;
    "-m mpipipe generate"*) exec "$PYTHON3" "$@" --bytes 20 ;;
    "-m pytest -q -p no:cacheprovider test_"*) exec "$PYTHON3" -c "$ALONE" "$@" ;;
    "-m pytest"*) exec "$PYTHON3" -c "import sys, mpipipe; print('tests:', sys.argv[1:])" "$@" ;;
esac
exec "$PYTHON3" "$@"
"""
# pytest-mpi and this project's plugins belong to the tests of the project
ALONE = "import sys, pytest; sys.exit(pytest.main(['-q', '-c', '/dev/null', '--rootdir=.', sys.argv[-1]]))"

SESSION = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(json.loads(line), "block", "exec"), names)
    print(json.dumps(printed.getvalue()), flush=True)
"""


class Block(NamedTuple):
    """One fenced block: its language, its text, and the line of the page where it begins."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page that are written in a language, in order."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        found.append(Block(language, "".join(lines), text[: match.start()].count("\n") + 1))
    return found


class Reader:
    """A person with a fresh copy of the checkout in `folder`, who has typed nothing yet.

    The environment that the jobs would install is a stand-in: its python and mpiexec are those that run the tests, and
    long commands do a part of their work (`LESS`).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("jobs", "mpipipe", "docs/tasks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for source in (ROOT / "mpipipe").rglob("*.py"):  # what is compiled already, not every page compiles again
            compiled = Path(cache_from_source(str(source)))
            if compiled.exists():
                beside = folder / source.relative_to(ROOT).parent / "__pycache__"
                beside.mkdir(exist_ok=True)
                shutil.copy2(compiled, beside / f"{source.stem}.{sys.implementation.cache_tag}.pyc")
        data = folder / ".data.txt"
        data.write_text("A schedule is data that is proven before the first message is sent.\n" * 400)
        venv = folder / ".venv" / "bin"
        venv.mkdir(parents=True)
        script(venv / "python", LESS)
        script(venv / "mpiexec", f'exec {mpiexec()} "$@"\n')
        script(venv / "pip", "exit 1\n")  # nothing is left to install
        (venv / "activate").write_text(f'export PATH="{venv}:$PATH"\n')
        sums = "cat pyproject.toml jobs/common.sh | cksum"  # as jobs/common.sh itself
        stamp = subprocess.run(sums, shell=True, cwd=folder, capture_output=True, text=True).stdout
        for extras in ("mpich", "mpich,test", "mpich,docs"):
            (folder / ".venv" / f"installed-{extras}").write_text(f"{folder} {stamp}")
        self.env = job_environment(
            {"PYTHON3": sys.executable, "DATA": str(data), "ALONE": ALONE, "OMP_NUM_THREADS": "1"}
        )
        self.env["PYTHONPATH"] = str(folder)  # the copy, where an installation would be
        self.env["RANKS"] = "2"  # of the job scripts, which start four
        # bytecode ends with the copy
        for name in ("MPI", "PYTHON", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
            self.env.pop(name, None)
        self.state = folder / ".state"
        self.state.write_text("")
        self.session = None
        self.printed = ""

    def read(self, block: Block):
        """Do what the block says; AssertionError where it fails or prints something else than the page says."""
        named = FILE.match(block.text)
        if block.language in SHOWN:
            return
        if block.language == "output":
            check_printed(self.printed, block.text)
        elif named:
            (self.folder / named.group(1)).write_text(block.text)
        elif block.language == "bash":
            self._shell(block.text)
        elif block.language == "python":
            self._session(block.text)
        else:
            raise AssertionError(f"line {block.line}: a block of {block.language} without the name of a file")

    def _shell(self, text):
        # what a block exports and where it goes, the next one finds
        command = f". {self.state}\nset -e -o pipefail\n{text}\n(export -p; echo cd \"'$PWD'\") > {self.state}\n"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout

    def _session(self, text):
        if self.session is None:
            self.session = subprocess.Popen(
                [sys.executable, "-c", SESSION],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.session.stdin.write(json.dumps(text) + "\n")
        self.session.stdin.flush()
        line = self.session.stdout.readline()
        if not line.startswith('"'):
            rest = self.session.stdout.read()  # it has ended
            raise AssertionError(f"{text}\n{line}{rest}")
        self.printed = json.loads(line)

    def close(self):
        """End the session."""
        if self.session is not None:
            self.session.stdin.close()
            self.session.wait(10)


def script(path: Path, text: str):
    """Write an executable shell script."""
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


def read_page(page: Path, folder: Path) -> int:
    """Run all blocks of a page in order; returns how many there were."""
    reader = Reader(folder)
    blocks = blocks_of(page)
    try:
        for block in blocks:
            try:
                reader.read(block)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(f"{os.path.relpath(page, ROOT)}, line {block.line}: {error}") from None
    finally:
        reader.close()
    return len(blocks)
