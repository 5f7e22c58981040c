"""One part of a GPU check: a command with a limit, its log, and what became of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from mpipipe import arrays, files
from mpipipe.attention import kernels
from mpipipe.environment import git_commit, versions

GRACE = 10.0  # seconds between the polite and the final signal
SHORTEST = 5.0  # seconds; with less time left a check is skipped
LONGEST_LINE = 200
SUMMARY = re.compile(r"\d+ (passed|skipped|failed|error).* in [\d.]+s")  # of pytest

Kind = Literal["information", "correctness", "measurement"]
Status = Literal["ok", "failed", "cut", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    kind: Kind  # only a failed "correctness" check makes the whole check fail
    check: str  # its name
    status: Status  # "cut" where a limit, its own or that of everything, ended it before a test had failed
    seconds: int
    why: str  # the summary line of pytest, or the reason

    def __str__(self) -> str:
        return f"{self.check} {self.status}" + (f" ({self.why})" if self.why else "")


def run_check(
    kind: Kind,
    name: str,
    limit: float,
    command: Sequence[str],
    *,
    deadline: float,
    log: Path,
    variables: Mapping[str, str],
) -> Outcome:
    """Run a command for `limit` seconds at most, and not past the `deadline` of time.monotonic, with its log."""
    left = deadline - monotonic()
    whose = "its own limit" if limit <= left else "what was left for everything"
    limit = min(limit, left)
    if limit < SHORTEST:
        return Outcome(kind, name, "skipped", 0, "no time left")
    start = monotonic()
    code = _run_limited(command, limit, log, variables)
    seconds = round(monotonic() - start)
    printed = log.read_text(errors="replace").splitlines()
    tests = next(filter(SUMMARY.search, reversed(printed)), "").replace("=", "").strip()
    if code == 0:
        return Outcome(kind, name, "ok", seconds, tests)
    if code is None:
        found_failure = "failed" in tests or "error" in tests
        why = f"ended at {limit:.0f} s, {whose}; see {log}" + (f": {tests}" if tests else "")
        return Outcome(kind, name, "failed" if found_failure else "cut", seconds, why)
    why = tests or next((line for line in reversed(printed) if line.strip(" \t=_-")), "")[:LONGEST_LINE]
    return Outcome(kind, name, "failed", seconds, f"exit {code}; see {log}: {why}")


def _run_limited(command: Sequence[str], limit: float, log: Path, variables: Mapping[str, str]) -> int | None:
    """Return the exit code of a command, or None if it was ended at its limit with all processes of its group."""
    with open(log, "wb") as output:
        try:
            job = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{command[0]}: {error.strerror}\n".encode())
            return 127
        try:
            return job.wait(limit)
        except subprocess.TimeoutExpired:
            _end(job, signal.SIGINT)  # pytest then reports what it has so far
            return None
        except BaseException:
            _end(job, signal.SIGTERM)
            raise


def _end(job: subprocess.Popen[bytes], polite: signal.Signals) -> None:
    """Signal the process group of a job; kill what is left of it after GRACE seconds."""
    os.killpg(job.pid, polite)
    try:
        job.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


# -- The report of a GPU check: gpu_check.json for programs, gpu_check.md for people, a table on the terminal ---------
#
# All files of the check are packed into one next to their folder, for machines that give back few files.


LIBRARIES: dict[str, Callable[[], object]] = {
    "NVRTC": lambda: ".".join(map(str, arrays.cupy().cuda.nvrtc.getVersion())),
    "cuBLAS": lambda: arrays.cupy().cuda.cublas.getVersion(arrays.cupy().cuda.device.get_cublas_handle()),
    "NCCL": lambda: arrays.nccl().get_version(),
}


def write(folder: Path, outcomes: Sequence[Outcome]) -> int:
    """Write the report into `folder`, pack that into a tar file next to it, and return the exit code."""
    facts = _facts(folder, outcomes)
    files.write_whole(folder / "gpu_check.json", (json.dumps(facts, indent=1) + "\n").encode())
    files.write_whole(folder / "gpu_check.md", ("\n\n".join(_paragraphs(facts, outcomes)) + "\n").encode())
    width = max(len(outcome.check) for outcome in outcomes)
    lines = [f"{o.check:<{width}} {o.status:<7} {o.seconds:>4} s  {o.why}" for o in outcomes]
    failed = [o.check for o in outcomes if o.kind == "correctness" and o.status == "failed"]
    verdict = f"{'failed' if failed else 'ok'} {' '.join(failed)}"
    path = folder.with_name(folder.name + ".tar.gz")
    with tarfile.open(path, "w:gz") as packed:
        packed.add(folder, folder.name)
    lines.append(f"mpipipe: gpu check {verdict} results={folder}/gpu_check.md packed={path}")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    return 1 if failed else 0


def _facts(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    benches = [json.loads(path.read_text()) for path in sorted(folder.glob("bench*.json"))]
    gpus, git = arrays.describe_gpus(), git_commit()
    return {
        "date": date.today().isoformat(),
        "commit": git["commit"] + ("-dirty" if git["changed"] else "") if git else "unknown",
        "gpus": gpus,
        "attention by": kernels.describe(),
        "machine": _machine(),
        "versions": versions(),
        "checks": [asdict(outcome) for outcome in outcomes],
        "measurements": [row for bench in benches for row in bench["rows"]],
        "failed measurements": [problem for bench in benches for problem in bench["failed"]],
    }


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
        except Exception as error:  # a missing library raises what it likes
            libraries.append(f"no {name} ({type(error).__name__})")
    return [*lines, ", ".join(libraries)]


def _paragraphs(facts: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    about = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    measured = [
        [row["what"], f"{_number(row['value'])} {row['unit']}", row["peer"], _number(row["peer_value"]),
         _number(row["ratio"]), row["goal"]] for row in facts["measurements"]
    ]  # fmt: skip
    return [
        f"# {'; '.join(facts['gpus'])}",
        f"`jobs/gpu_check.sh` on {facts['date']}, commit {facts['commit']}: {about}.",
        _table(["check", "outcome", "seconds", ""], [[o.check, o.status, o.seconds, o.why] for o in outcomes]),
        f"Attention by: {facts['attention by']}.",
        *(f"`{line}`" for line in facts["machine"]),
        _table(["measured", "value", "beside", "value", "ratio", "goal"], measured) if measured else
        "Nothing was measured.",
        *(f"- {problem}" for problem in facts["failed measurements"]),
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
