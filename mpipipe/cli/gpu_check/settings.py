"""What a GPU check is asked to do, from environment variables: see jobs/gpu_check.sh."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mpipipe.cli.gpu_check.interpreter import CannotStartError, Interpreter

QUICK_TESTS = ("tests/arrays", "tests/nn/test_device_kernels.py")


@dataclass(frozen=True)
class Limits:
    """Seconds that the parts of a check may take.

    Attributes
    ----------
    everything : all parts together; what this limit cuts short has not failed
    tests : the tests on one rank
    bench : `bench gpu` on one rank
    bench_ranks : `bench gpu` on two ranks
    tests_ranks : the tests on two or four ranks, each time
    """

    everything: float = 540
    tests: float = 260
    bench: float = 230
    bench_ranks: float = 60
    tests_ranks: float = 130


QUICK_LIMITS = Limits(everything=180, tests=100, bench=75)
WHOLE_LIMITS = Limits()


@dataclass(frozen=True)
class Settings:
    """One GPU check.

    Attributes
    ----------
    interpreter : the Python that runs every part
    mpiexec : launcher to try first, or None
    results : folder for gpu_check.json, gpu_check.md and the logs
    quick : whether this is only the first look
    limits : seconds
    tests : files or folders to test
    """

    interpreter: Interpreter
    mpiexec: str | None
    results: Path
    quick: bool
    limits: Limits
    tests: tuple[str, ...]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read PYTHON, MPIEXEC, RESULTS, QUICK, LIMIT and TESTS; raises CannotStartError for a wrong LIMIT."""
        quick = environment.get("QUICK") == "1"
        limits = QUICK_LIMITS if quick else WHOLE_LIMITS
        if text := environment.get("LIMIT"):
            if not text.isdigit():
                raise CannotStartError(f"LIMIT={text} is no number of seconds")
            limits = Limits(**{**vars(limits), "everything": int(text)})
        results = environment.get("RESULTS") or f"results/gpu_check-{datetime.now():%Y%m%d-%H%M%S}"
        tests = tuple(environment.get("TESTS", "").split()) or (QUICK_TESTS if quick else ("tests",))
        interpreter = Interpreter(environment.get("PYTHON") or sys.executable)
        return cls(interpreter, environment.get("MPIEXEC") or None, Path(results), quick, limits, tests)

    def make_folder(self) -> None:
        """Make the folder for results. Raises CannotStartError where that is impossible."""
        try:
            self.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotStartError(f"cannot write to {self.results}: {error.strerror}") from error
