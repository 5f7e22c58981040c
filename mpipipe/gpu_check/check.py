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
from typing import Any, Literal, NamedTuple

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
        "measurements": [row | beside(row, gpus) for bench in benches for row in bench["rows"]],
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


# -- What was expected of measurements before anything of this package had run on a GPU: data, to be proven wrong -----
#
# The numbers were computed from the sources, from data sheets and from what others have published: for one H100 SXM
# with 3.35 TB/s of memory, of which 2.8 are usable, and one H200 with 4.8 TB/s, of which 4.3 are. Both have 989
# TFLOP/s in bfloat16 without sparsity, of which products of these sizes reach 550. They are no measurements, and no
# goals: goals stand in `bench gpu`.


GPUS = ("H100", "H200")


class Expectation(NamedTuple):
    """A range that a measurement was expected in, in the unit of the row."""

    row: str  # regular expression for what was measured, found at the beginning
    ranges: dict[str, tuple[float, float]]  # lowest and highest value on each GPU
    why: str  # where the ranges come from, those of GPUS in their order
    peer: str = ""  # what the row is compared with, where the range is of that; else it is of the row's own value
    ratio: bool = False  # whether the range is of the ratio between both


def _both(low: float, high: float) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(GPUS, (low, high))


STEP, SHORT = r"training step, {}, .*1 x 8 x 1024 tokens", r"training step, 16 x 1 x 512 tokens"
UNTIED, TIED, ANY = (STEP.format(kind) for kind in ("untied", "tied", "(un)?tied"))
EXPECTATIONS = (
    Expectation(
        UNTIED, {"H100": (415e3, 460e3), "H200": (450e3, 500e3)},
        "18.9, 17.3 ms a step: products 10.9, attention 2.3, norms, SwiGLU, loss and optimizer 5.2, 3.7, gaps 0.6",
    ),
    Expectation(
        TIED, _both(0.97, 1.06),
        "no gradient crosses to the host; 38.6 M parameters less for AdamW, cast and zero",
        peer="untied", ratio=True,
    ),
    Expectation(
        ANY, {"H100": (280e3, 280e3), "H200": (333e3, 333e3)}, "29, 24.6 ms a step", peer="PyTorch eager, autocast",
    ),
    Expectation(
        ANY, {"H100": (430e3, 430e3), "H200": (468e3, 468e3)}, "19, 17.5 ms a step", peer="PyTorch torch.compile",
    ),
    Expectation(
        f"{SHORT}, CUDA graphs", _both(0.75, 0.9),
        "a launch for each action in place of some 200; products of 512 rows reach less of the peak",
        peer="1 x 8 x 1024 tokens", ratio=True,
    ),
    Expectation(
        f"{SHORT}$", _both(0.45, 0.55), "24 calls a layer of about 8 us: bound by launches below 1500 tokens",
        peer="1 x 8 x 1024 tokens", ratio=True,
    ),
    Expectation(
        r"copy on the device", {"H100": (2600, 3350), "H200": (4000, 4800)},
        "memory: 3.35, 4.8 TB/s by the data sheets, 2.8, 4.3 usable",
    ),
    Expectation(r"staged, 16777216 B$", _both(5.0, 8.4), "12.6 MB through pinned memory in 1.5 to 2.5 ms"),
    Expectation(r"(direct|nccl), 16777216 B$", _both(100, 400), "12.6 MB between two GPUs of a node in 0.05 ms"),
)  # fmt: skip


def beside(row: Mapping[str, Any], gpus: Iterable[str]) -> dict[str, str]:
    """Return what was expected of a row of `bench gpu`, and "kept", "beaten" or "missed"; "" if nothing was."""
    kinds = {next((kind for kind in GPUS if re.search(rf"\b{kind}\b", gpu)), "") for gpu in gpus}
    kind = kinds.pop() if len(kinds) == 1 else ""
    entry = next((each for each in EXPECTATIONS if _concerns(each, row)), None)
    if entry is None or not kind:
        return {"expected": "", "verdict": ""}
    value = row["ratio"] if entry.ratio else row["peer_value"] if entry.peer else row["value"]
    low, high = entry.ranges[kind]
    span = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    what = "ratio " if entry.ratio else f"{row['peer']} " if entry.peer else ""
    slack = 0.05 * low if low == high else 0.0  # a range of one number holds what rounds to its two digits
    verdict = "missed" if value < low - slack else "beaten" if value > high + slack else "kept"
    return {"expected": f"{what}{span} ({entry.why})", "verdict": verdict}


def _concerns(each: Expectation, row: Mapping[str, Any]) -> bool:
    if not re.match(each.row, row["what"]):
        return False
    return row["peer"].startswith(each.peer) if each.peer else not row["peer"].startswith("PyTorch")
