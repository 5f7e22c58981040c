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

from mpipipe.gpu_check import check
from mpipipe.gpu_check.check import Clock, Kind, Outcome, run_check

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


class Suite:
    """All checks on this machine.

    settings : what to check, and where results go
    clock : the time that all checks share
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.python = settings.interpreter.path
        self.outcomes: list[Outcome] = []

    def run(self) -> int:
        """Run every check, write the report, and return the exit code: 1 where a correctness check failed, else 0."""
        reason = self.settings.interpreter.mpi_error()
        pytest = self._pytest_command()
        limits = self.settings.limits
        self._check("information", "info", 60, [self.python, "-m", "mpipipe", "info"], show=True)
        attention = [self.python, "-m", "mpipipe.gpu_check.attention"]
        self._check("correctness", "attention", limits.attention, attention, show=True)
        warm = [self.python, "-m", "gpu_emulator.warm_kernels", str(self.settings.processes)]
        self._check("information", "compile", limits.compile, warm)
        if not self.settings.quick:
            extra = [self.python, "-m", "mpipipe.gpu_check.extra"]
            self._check("correctness", "extra", limits.extra, extra, show=True)
        if reason is None:
            tests = [self.python, *pytest, "--few-plans", *self.settings.tests]
            self._check("correctness", "tests-1", limits.tests, tests, OWN_STREAM)
        else:
            self._say(NO_MPI.format(python=self.python, reason=reason))
            self._skip("correctness", ["tests-1"], NO_LIBRARY)
        quick = ["--quick", "--no-peers"] if self.settings.quick else []
        self._check("measurement", "bench", limits.bench, self._bench("bench", quick), show=True)
        if not self.settings.quick:
            self._run_on_several_ranks(pytest, NO_LIBRARY if reason is not None else None)
        return check.write(self.settings.results, self.outcomes)

    def _run_on_several_ranks(self, pytest: Sequence[str], obstacle: str | None) -> None:
        """Run what needs several ranks, or skip it for the `obstacle`."""
        mpiexec = None
        if obstacle is None:
            mpiexec = self.settings.interpreter.find_mpiexec(self.settings.mpiexec)
        if mpiexec is None:
            obstacle = obstacle or NO_LAUNCHER
            self._skip("correctness", ["tests-2-staged", "tests-4-staged", "tests-direct"], obstacle)
            self._skip("measurement", ["bench-2"], obstacle)
            return
        limits = self.settings.limits
        bench = [mpiexec, "-n", "2", *self._bench("bench-2", [])]
        self._check("measurement", "bench-2", limits.bench_ranks, bench, show=True)
        ways = {"staged": "0", "direct": "1"}
        awareness = self.settings.interpreter.gpu_awareness(mpiexec)
        if " direct: " not in (awareness or ""):
            del ways["direct"]
            self._skip("correctness", ["tests-direct"], awareness or UNKNOWN)
        for way, setting in ways.items():
            for ranks in ("2", "4"):
                tests = [mpiexec, "-n", ranks, self.python, *pytest, "--few-plans", "--several-ranks"]
                self._check("correctness", f"tests-{ranks}-{way}", limits.tests_ranks, [*tests, *self.settings.tests],
                            {"MPIPIPE_GPU_DIRECT": setting})  # fmt: skip

    def _pytest_command(self) -> list[str]:
        """Return the options of Python that run the tests of device code."""
        command = ["-m", "pytest", "-q", "--color=no", "--durations=10", "-p", "no:cacheprovider", "-m", "gpu"]
        command += ["-p", "support.gpu_selection"]
        if not self.settings.interpreter.has_pytest_mpi():
            command += ["-p", "support.mpi_stand_in"]
        return command

    def _bench(self, name: str, options: Sequence[str]) -> list[str]:
        path = self.settings.results / f"{name}.json"
        return [self.python, "-m", "mpipipe", "bench", "gpu", *options, "--json", str(path)]

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
        log = self.settings.results / f"{name}.log"
        self._note(run_check(kind, name, limit, command, clock=self.clock, log=log, variables=variables or {}))
        if show and log.exists():
            self._say(log.read_text(errors="replace").rstrip("\n"))

    def _skip(self, kind: Kind, names: Sequence[str], why: str) -> None:
        for name in names:
            self._note(Outcome(kind, name, "skipped", 0, why))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._say(f"gpu_check: {outcome}")

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


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


@dataclass(frozen=True)
class Settings:
    """One GPU check.

    interpreter : the Python that runs every part
    mpiexec : launcher to try first, or None
    results : folder for gpu_check.json, gpu_check.md and the logs
    quick : whether this is only the first look
    limits : seconds
    tests : files or folders to test
    processes : that compile kernels at a time
    """

    interpreter: Interpreter
    mpiexec: str | None
    results: Path
    quick: bool
    limits: Limits
    tests: tuple[str, ...]
    processes: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the variables that jobs/gpu_check.sh lists; raises CannotStartError for what is no number."""
        quick = environment.get("QUICK") == "1"
        limits = QUICK_LIMITS if quick else WHOLE_LIMITS
        if text := environment.get("LIMIT"):
            limits = replace(limits, everything=_number("LIMIT", text, "seconds"))
        text = environment.get("PROCESSES") or str(min(MOST_PROCESSES, os.cpu_count() or 1))
        processes = max(1, _number("PROCESSES", text, "processes"))
        results = environment.get("RESULTS") or f"results/gpu_check-{datetime.now():%Y%m%d-%H%M%S}"
        tests = tuple(environment.get("TESTS", "").split()) or (QUICK_TESTS if quick else ("tests",))
        interpreter = Interpreter(environment.get("PYTHON") or sys.executable)
        mpiexec = environment.get("MPIEXEC") or None
        return cls(interpreter, mpiexec, Path(results), quick, limits, tests=tests, processes=processes)

    def make_folder(self) -> None:
        """Make the folder for results. Raises CannotStartError if that is impossible."""
        try:
            self.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotStartError(f"cannot write to {self.results}: {error.strerror}") from error


def _number(name: str, text: str, what: str) -> int:
    if not text.isdigit():
        raise CannotStartError(f"{name}={text} is no number of {what}")
    return int(text)


# -- The Python interpreter that runs the parts of a check, and what it finds on this machine -------------------------


SECONDS = 60.0  # for a question to the interpreter
ERROR = re.compile(r"[A-Za-z_.]+(Error|Exception)")  # how the line of a traceback begins that names the exception


class CannotStartError(Exception):
    """The check cannot begin; the text says why."""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter with the packages that the check needs.

    path : its name on PATH, or its file
    """

    path: str

    def require_gpu(self) -> None:
        """Raise CannotStartError if the interpreter cannot use a GPU through CuPy, or lacks parts of CUDA."""
        answer = self._ask("import mpipipe.arrays as a; a.check_device('cuda')", timeout=None)
        if answer is None or answer.returncode:
            lines = [] if answer is None else answer.stderr.splitlines()
            named = [at for at, line in enumerate(lines) if ERROR.match(line)] or [-1]
            lines = lines[named[-1] :]  # the error with all its lines: one for each part that is missing
            raise CannotStartError("\n".join([*lines, f"this check needs a GPU that {self.path} can use through CuPy"]))

    def mpi_error(self) -> str | None:
        """Return why MPI cannot be loaded: the line that names the exception, else the last line. None if it can."""
        answer = self._ask("from mpi4py import MPI", timeout=None)
        if answer is None:
            return f"{self.path} cannot be started"
        if not answer.returncode:
            return None
        lines = answer.stderr.splitlines() or [f"exit {answer.returncode}"]
        named = [line for line in lines if ERROR.match(line)]
        return (named or lines)[-1]

    def has_pytest_mpi(self) -> bool:
        """Whether the plugin pytest-mpi is installed."""
        answer = self._ask("import pytest_mpi", timeout=None)
        return answer is not None and answer.returncode == 0

    def find_mpiexec(self, preferred: str | None) -> str | None:
        """Return a launcher that starts ranks which see each other, or None.

        The preferred one is tried first, then the one next to the interpreter, then the one on PATH.
        """
        beside = self._ask("import sys; print(sys.executable)", timeout=SECONDS)
        folder = Path(self.path if beside is None else beside.stdout.strip()).parent
        for mpiexec in filter(None, (preferred, str(folder / "mpiexec"), "mpiexec")):
            if shutil.which(mpiexec) is None:
                continue
            sizes = self._ask("from mpi4py import MPI; print(MPI.COMM_WORLD.size)", SECONDS, (mpiexec, "-n", "2"))
            if sizes is not None and sizes.stdout.split() == ["2", "2"]:
                return mpiexec
        return None

    def gpu_awareness(self, mpiexec: str) -> str | None:
        """Return what `mpipipe info` says on two ranks about MPI and device memory, or None."""
        answer = _run([mpiexec, "-n", "2", self.path, "-m", "mpipipe", "info"], SECONDS)
        lines = [] if answer is None else answer.stdout.splitlines()
        return next((line for line in lines if line.startswith("GPU-aware")), None)

    def _ask(
        self, code: str, timeout: float | None, launcher: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str] | None:
        return _run([*launcher, self.path, "-c", code], timeout)


def _run(command: list[str], timeout: float | None) -> subprocess.CompletedProcess[str] | None:
    """Return the outcome of a command, or None if it does not start or does not end in time."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
