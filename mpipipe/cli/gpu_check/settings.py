"""What a GPU check is asked to do, from environment variables: see jobs/gpu_check.sh."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from mpipipe.cli.gpu_check.interpreter import CannotStartError, Interpreter

MOST_PROCESSES = 8  # each takes half a gigabyte of the GPU for its context
QUICK_TESTS = ("tests/arrays", "tests/nn/test_device_kernels.py")


@dataclass(frozen=True)
class Limits:
    """Seconds that the parts of a check may take.

    Attributes
    ----------
    everything : all parts together; what this limit cuts short has not failed
    attention : cuDNN's own attention
    compile : compiling the kernels into CuPy's cache
    extra : CUDA graphs, NCCL on one rank, memory that runs out
    tests : the tests on one rank
    bench : `bench gpu` on one rank
    bench_ranks : `bench gpu` on two ranks
    tests_ranks : the tests on two or four ranks, each time
    """

    everything: float = 540
    attention: float = 60
    compile: float = 60
    extra: float = 60
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
