"""The checks in their order: cuDNN, graphs, NCCL, tests on one rank, measurements, tests on ranks that share a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from mpipipe.cli.gpu_check import report
from mpipipe.cli.gpu_check.check import Clock, Kind, Outcome, run_check
from mpipipe.cli.gpu_check.settings import Settings

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

    Parameters
    ----------
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
        attention = [self.python, "-m", "mpipipe.cli.gpu_check.attention"]
        self._check("correctness", "attention", limits.attention, attention, show=True)
        warm = [self.python, "-m", "support.warm_kernels", str(self.settings.processes)]
        self._check("information", "compile", limits.compile, warm)
        if not self.settings.quick:
            extra = [self.python, "-m", "mpipipe.cli.gpu_check.extra"]
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
        return report.write(self.settings.results, self.outcomes)

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
