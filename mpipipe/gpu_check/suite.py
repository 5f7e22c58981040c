"""The checks in their order: cuDNN, graphs, NCCL, tests on one rank, measurements, tests on ranks that share a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from mpipipe.gpu_check import check
from mpipipe.gpu_check.check import Kind, Outcome, run_check

NO_MPI = """\
gpu_check: {python} cannot load MPI: {reason}
  The tests need it, the measurements on one rank do not. With the package index at hand:
    {python} -m pip install mpi4py mpich
  Without: on another machine `pip download --no-deps mpich` (and mpi4py, where it is missing), and here
    {python} -m pip install --no-index --no-deps --ignore-installed --prefix SITE mpich-*.whl
    LD_LIBRARY_PATH=SITE/lib MPIEXEC=SITE/bin/mpiexec bash jobs/gpu_check.sh"""
NO_LIBRARY = "no MPI library"
NO_LAUNCHER = "no mpiexec starts ranks that see each other"
OWN_STREAM = {"MPIPIPE_TEST_GPU_STREAM": "own"}  # as trainings have it; the tests on several ranks take the null stream
UNKNOWN = "this MPI is not known to take device memory"


@dataclass
class Suite:
    """All checks on this machine; they share the time from now on."""

    python: str  # the interpreter that runs every part, by its name on PATH or its file
    mpiexec: str | None  # launcher to try first
    results: Path  # folder for gpu_check.json, gpu_check.md and the logs
    quick: bool  # whether this is only the first look
    limits: Limits
    tests: tuple[str, ...]  # files or folders
    processes: int  # that compile kernels at a time

    def __post_init__(self) -> None:
        self.deadline = monotonic() + self.limits.everything
        self.outcomes: list[Outcome] = []

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Suite:
        """Read the variables that jobs/gpu_check.sh lists; raises CannotStartError for what is no number."""
        quick = environment.get("QUICK") == "1"
        limits = QUICK_LIMITS if quick else WHOLE_LIMITS
        if text := environment.get("LIMIT"):
            limits = replace(limits, everything=_number("LIMIT", text, "seconds"))
        text = environment.get("PROCESSES") or str(min(MOST_PROCESSES, os.cpu_count() or 1))
        processes = max(1, _number("PROCESSES", text, "processes"))
        results = environment.get("RESULTS") or f"results/gpu_check-{datetime.now():%Y%m%d-%H%M%S}"
        tests = tuple(environment.get("TESTS", "").split()) or (QUICK_TESTS if quick else ("tests",))
        python, mpiexec = environment.get("PYTHON") or sys.executable, environment.get("MPIEXEC") or None
        return cls(python, mpiexec, Path(results), quick, limits, tests=tests, processes=processes)

    def run(self) -> int:
        """Run every check, write the report, and return the exit code: 1 where a correctness check failed, else 0."""
        python, limits, quick = self.python, self.limits, self.quick
        reason = mpi_error(python)
        self._check("information", "info", 60, [python, "-m", "mpipipe", "info"], show=True)
        ask = [python, "-m", "mpipipe.gpu_check.extra"]
        self._check("correctness", "attention", limits.attention, [*ask, "attention"], show=True)
        warm = [python, "-m", "gpu_emulator.warm_kernels", str(self.processes)]
        self._check("information", "compile", limits.compile, warm)
        if not quick:
            self._check("correctness", "extra", limits.extra, [*ask, "graphs", "nccl", "memory"], show=True)
        tests = [python, "-m", "pytest", "-q", "--color=no", "--durations=10", "-p", "no:cacheprovider", "-m", "gpu"]
        tests += ["-p", "support.gpu_selection"]
        tests += [] if _ask(python, "import pytest_mpi").returncode == 0 else ["-p", "support.mpi_stand_in"]
        tests.append("--few-plans")
        if reason is None:
            self._check("correctness", "tests-1", limits.tests, [*tests, *self.tests], OWN_STREAM)
        else:
            print(NO_MPI.format(python=python, reason=reason), flush=True)
            self._skip("correctness", ["tests-1"], NO_LIBRARY)
        self._bench("bench", limits.bench, [], ["--quick", "--no-peers"] if quick else [])
        if not quick:
            mpiexec = find_mpiexec(python, self.mpiexec) if reason is None else None
            if mpiexec is None:
                obstacle = NO_LIBRARY if reason else NO_LAUNCHER
                self._skip("correctness", ["tests-2-staged", "tests-4-staged", "tests-direct"], obstacle)
                self._skip("measurement", ["bench-2"], obstacle)
            else:
                self._run_on_several_ranks(mpiexec, tests)
        return check.write(self.results, self.outcomes)

    def _run_on_several_ranks(self, mpiexec: str, tests: Sequence[str]) -> None:
        self._bench("bench-2", self.limits.bench_ranks, [mpiexec, "-n", "2"], [])
        ways = {"staged": "0", "direct": "1"}
        lines = _run(mpiexec, "-n", "2", self.python, "-m", "mpipipe", "info").stdout.splitlines()
        awareness = next((line for line in lines if line.startswith("GPU-aware")), UNKNOWN)
        if " direct: " not in awareness:
            del ways["direct"]
            self._skip("correctness", ["tests-direct"], awareness)
        for way, setting in ways.items():
            for ranks in ("2", "4"):
                command = [mpiexec, "-n", ranks, *tests, "--several-ranks", *self.tests]
                variables = {"MPIPIPE_GPU_DIRECT": setting}
                self._check("correctness", f"tests-{ranks}-{way}", self.limits.tests_ranks, command, variables)

    def _bench(self, name: str, limit: float, launcher: Sequence[str], options: Sequence[str]) -> None:
        command = [*launcher, self.python, "-m", "mpipipe", "bench", "gpu", *options]
        path = self.results / f"{name}.json"
        self._check("measurement", name, limit, [*command, "--json", str(path)], show=True)

    def _check(
        self,
        kind: Kind,
        name: str,
        limit: float,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        show: bool = False,
    ) -> None:
        """Run a check; one that fails does not stop the others. `show` prints its log."""
        log = self.results / f"{name}.log"
        self._note(run_check(kind, name, limit, command, deadline=self.deadline, log=log, variables=variables or {}))
        if show and log.exists():
            print(log.read_text(errors="replace").rstrip("\n"), flush=True)

    def _skip(self, kind: Kind, names: Sequence[str], why: str) -> None:
        for name in names:
            self._note(Outcome(kind, name, "skipped", 0, why))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"gpu_check: {outcome}", flush=True)


# -- What a GPU check is asked to do, from environment variables: see jobs/gpu_check.sh -------------------------------


MOST_PROCESSES = 8  # each takes half a gigabyte of the GPU for its context
QUICK_TESTS = ("tests/arrays", "tests/nn/test_device_kernels.py")


@dataclass(frozen=True)
class Limits:
    """Seconds that the parts of a check may take."""

    everything: float = 540  # all parts together; what this limit cuts short has not failed
    attention: float = 60
    compile: float = 60  # the kernels, into CuPy's cache
    extra: float = 60
    tests: float = 260  # on one rank
    bench: float = 230
    bench_ranks: float = 60  # `bench gpu` on two ranks
    tests_ranks: float = 130  # the tests on two or four ranks, each time


QUICK_LIMITS = Limits(everything=180, tests=100, bench=75)
WHOLE_LIMITS = Limits()


def _number(name: str, text: str, what: str) -> int:
    if not text.isdigit():
        raise CannotStartError(f"{name}={text} is no number of {what}")
    return int(text)


# -- What the interpreter that runs the parts finds on this machine ---------------------------------------------------


SECONDS = 120.0  # for a question
ERROR = re.compile(r"[A-Za-z_.]+(Error|Exception)")  # how the line of a traceback begins that names the exception


class CannotStartError(Exception):
    """The check cannot begin; the text says why."""


def require_gpu(python: str) -> None:
    """Raise CannotStartError if the interpreter cannot use a GPU through CuPy, or lacks parts of CUDA."""
    answer = _ask(python, "import mpipipe.arrays as a; a.check_device('cuda')")
    if answer.returncode:
        lines = answer.stderr.splitlines()
        named = [at for at, line in enumerate(lines) if ERROR.match(line)] or [-1]
        lines = lines[named[-1] :]  # the error with all its lines: one for each part that is missing
        raise CannotStartError("\n".join([*lines, f"this check needs a GPU that {python} can use through CuPy"]))


def mpi_error(python: str) -> str | None:
    """Return why MPI cannot be loaded: the line that names the exception, else the last line. None if it can."""
    answer = _ask(python, "from mpi4py import MPI")
    if not answer.returncode:
        return None
    lines = answer.stderr.splitlines() or [f"exit {answer.returncode}"]
    return ([line for line in lines if ERROR.match(line)] or lines)[-1]


def find_mpiexec(python: str, preferred: str | None) -> str | None:
    """Return a launcher whose ranks see each other, or None: the preferred one, the interpreter's, or that on PATH."""
    beside = Path(_ask(python, "import sys; print(sys.executable)").stdout.strip() or python).parent / "mpiexec"
    for mpiexec in filter(None, (preferred, str(beside), "mpiexec")):
        if shutil.which(mpiexec) is not None:
            sizes = _ask(python, "from mpi4py import MPI; print(MPI.COMM_WORLD.size)", mpiexec, "-n", "2")
            if sizes.stdout.split() == ["2", "2"]:
                return mpiexec
    return None


def _ask(python: str, code: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    return _run(*launcher, python, "-c", code)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Return the outcome of a command; one that does not start or does not end in time has failed."""
    options: dict[str, Any] = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    try:
        return subprocess.run(command, timeout=SECONDS, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error}")


def main() -> int:
    """Run all checks. Returns 0 where no correctness check failed, 1 where one did, 2 where none could begin."""
    try:
        suite = Suite.from_environment(os.environ)
        require_gpu(suite.python)
        try:
            suite.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotStartError(f"cannot write to {suite.results}: {error.strerror}") from error
    except CannotStartError as error:
        sys.stderr.write(f"gpu_check: {error}\n")
        return 2
    return suite.run()
