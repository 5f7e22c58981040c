"""The Python interpreter that runs the parts of a check, and what it finds on this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SECONDS = 60.0  # for a question to the interpreter
ERROR = re.compile(r"[A-Za-z_.]+(Error|Exception)")  # how the line of a traceback begins that names the exception


class CannotStartError(Exception):
    """The check cannot begin; the text says why."""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter with the packages that the check needs.

    Attributes
    ----------
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

        The preferred one is tried first, then the one beside the interpreter, then the one on PATH.
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
