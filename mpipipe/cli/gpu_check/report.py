"""The report of a GPU check: gpu_check.json for programs, gpu_check.md for people, a table on the terminal.

All files of the check are packed into one beside their folder, for machines that give back few files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from mpipipe import arrays, files
from mpipipe.attention import kernels
from mpipipe.cli.gpu_check import expectations
from mpipipe.cli.gpu_check.check import Outcome
from mpipipe.environment import versions

LIBRARIES: dict[str, Callable[[], object]] = {
    "NVRTC": lambda: ".".join(map(str, arrays.cupy().cuda.nvrtc.getVersion())),
    "cuBLAS": lambda: arrays.cupy().cuda.cublas.getVersion(arrays.cupy().cuda.device.get_cublas_handle()),
    "NCCL": lambda: arrays.nccl().get_version(),
}


def write(folder: Path, outcomes: Sequence[Outcome]) -> int:
    """Write the report into `folder`, print its last lines, and return the exit code."""
    facts = _facts(folder, outcomes)
    files.write_whole(folder / "gpu_check.json", (json.dumps(facts, indent=1) + "\n").encode())
    files.write_whole(folder / "gpu_check.md", ("\n\n".join(_paragraphs(facts, outcomes)) + "\n").encode())
    width = max(len(outcome.check) for outcome in outcomes)
    lines = [f"{o.check:<{width}} {o.status:<7} {o.seconds:>4} s  {o.why}" for o in outcomes]
    failed = [o.check for o in outcomes if o.kind == "correctness" and o.status == "failed"]
    verdict = f"{'failed' if failed else 'ok'} {' '.join(failed)}"
    lines.append(f"mpipipe: gpu check {verdict} results={folder}/gpu_check.md packed={_pack(folder)}")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    return 1 if failed else 0


def _pack(folder: Path) -> Path:
    """Pack a folder into a tar file beside it."""
    path = folder.with_name(folder.name + ".tar.gz")
    with tarfile.open(path, "w:gz") as packed:
        packed.add(folder, folder.name)
    return path


def _facts(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    benches = [json.loads(path.read_text()) for path in sorted(folder.glob("bench*.json"))]
    gpus = arrays.describe_gpus()
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "gpus": gpus,
        "attention by": kernels.describe(),
        "machine": _machine(),
        "versions": versions(),
        "checks": [asdict(outcome) for outcome in outcomes],
        "measurements": [row | expectations.beside(row, gpus) for bench in benches for row in bench["rows"]],
        "failed measurements": [problem for bench in benches for problem in bench["failed"]],
    }


def _commit() -> str:
    """Name the commit of this checkout, or "unknown" where git or the history is missing."""
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return git.stdout.strip() or "unknown"


def _machine() -> list[str]:
    """Describe the driver's side of each GPU, and the libraries that CuPy has loaded: what can be had of it."""
    names = "driver_version,clocks.max.sm,clocks.max.memory,clocks.sm,power.limit"
    try:
        query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    libraries = []
    for name, version in LIBRARIES.items():
        try:
            libraries.append(f"{name} {version()}")
        except Exception as error:  # a library that is missing is told in many ways
            libraries.append(f"no {name} ({type(error).__name__})")
    return [*lines, ", ".join(libraries)]


def _paragraphs(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    about = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    measured = [
        [row["what"], f"{_number(row['value'])} {row['unit']}", row["peer"], _number(row["peer_value"]),
         _number(row["ratio"]), row["goal"], row["expected"], row["verdict"]] for row in facts["measurements"]
    ]  # fmt: skip
    return [
        f"# {'; '.join(facts['gpus'])}",
        f"`jobs/gpu_check.sh` on {facts['date']}, commit {facts['commit']}: {about}.",
        _table(["check", "outcome", "seconds", ""], [[o.check, o.status, o.seconds, o.why] for o in outcomes]),
        f"Attention by: {facts['attention by']}.",
        *(f"`{line}`" for line in facts["machine"]),
        _table(["measured", "value", "beside", "value", "ratio", "goal", "expected", ""], measured) if measured else
        "Nothing was measured.",
        *(f"- {problem}" for problem in facts["failed measurements"]),
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
