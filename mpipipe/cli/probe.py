"""Tries whether MPI takes device memory, in a job of its own: where MPI does not, that job crashes and not this one.

`probe()` starts `python -m mpipipe.cli.probe` on two ranks of this host. They exchange device arrays of 8 bytes and of
4 MiB, which MPI libraries move in different ways, and look at what arrives.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.comm import DeviceTransport, select_device
from mpipipe.job import Communicator, run_or_abort, runtime, wait_for

LAUNCHER = "MPIPIPE_MPIEXEC"
STARTED, WORKS, WRONG = "mpipipe probe on rank", "device memory works", "device memory arrives wrong"
SIZES = (8, 4 << 20)  # bytes: within the first packet, and by rendezvous
ROUNDS = 3
LINES = 12  # of the job's output, kept for the report
GRACE = 5.0  # seconds for a launcher to take its ranks along


class ProbeResult(NamedTuple):
    """What became of the job."""

    outcome: str  # "works", "crashed with signal N", "wrong data", "failed", "timed out" or "could not start"
    lines: list[str]  # the last that it printed

    @property
    def works(self) -> bool:
        """Whether both ranks received what was sent."""
        return self.outcome == "works"


def probe(mpiexec: str | None = None, timeout: float = 60, command: list[str] | None = None) -> ProbeResult:
    """Try direct messages of device arrays between two ranks, and return what came of it; for one rank to call.

    The launcher is `mpiexec` with its options, or MPIPIPE_MPIEXEC, or that of `find_launcher`. Each rank runs
    `command`, by default this module.
    """
    launcher = mpiexec or os.environ.get(LAUNCHER) or find_launcher()
    if launcher is None:
        return ProbeResult("could not start", [f"no mpiexec found: set {LAUNCHER}"])
    launch = shlex.split(launcher)
    if Path(launch[0]).name == "srun":
        launch.append("--overlap")  # share what the step that asks has
    command = [*launch, "-n", "2", *(command or [sys.executable, "-m", "mpipipe.cli.probe"])]
    try:
        job = subprocess.Popen(
            command,
            env=job_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return ProbeResult("could not start", [f"{launcher}: {error}"])
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return ProbeResult("timed out", _tail(_end(job)))
    return ProbeResult(outcome_of(job.returncode, output), _tail(output))


def outcome_of(code: int, output: str) -> str:
    """Return the outcome that a job's exit code and output show. Launchers pass signals on in several ways."""
    if WRONG in output:
        return "wrong data"
    if output.count(WORKS) == 2 and code == 0:
        return "works"
    if "Segmentation fault" in output or "signal 11" in output.lower():
        return "crashed with signal 11"
    found = re.search(r"(?:killed by|on) signal:? (\d+)|exit code: (\d+)", output, re.IGNORECASE)
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if found and found[1]:
        number = int(found[1])
    if number:
        return f"crashed with signal {number}"
    return "failed" if STARTED in output else "could not start"


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the probe's job, in which device memory goes to MPI whatever the evidence."""
    return {**environment_of_own_job(environment), "MPIPIPE_GPU_DIRECT": "1"}


def find_launcher() -> str | None:
    """Return the mpiexec next to the MPI library in use or next to python, or one on PATH; srun where it is alone."""
    runtime.mpi()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    libraries = [Path(path) for path in dict.fromkeys(re.findall(r"/\S*/libmpi(?:_\w+)?\.so\S*", maps))]
    folders = [*(path.parent.parent / "bin" for path in libraries), *(path.parent / "bin" for path in libraries)]
    for folder in [*folders, Path(sys.executable).parent]:
        for name in ("mpiexec", "mpiexec.hydra", "mpirun"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    return next((found for name in ("mpiexec", "mpirun", "srun") if (found := shutil.which(name))), None)


def _tail(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.strip()][-LINES:]


def _end(job: subprocess.Popen[str]) -> str:
    """Stop a launcher, politely at first so that it stops its ranks, and return what they printed."""
    for stop in (job.terminate, job.kill):
        stop()
        try:
            return job.communicate(timeout=GRACE)[0]
        except subprocess.TimeoutExpired:
            continue
    return "(the output is lost: ranks outlive their launcher)"


# -- in the job -------------------------------------------------------------------------------------------------------


def exchange(comm: Communicator) -> None:
    """Swap device arrays with the other ranks in a ring, and print what came of it."""
    transport = DeviceTransport(comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    wrong = 0
    for nbytes in SIZES:
        received = transport.empty((nbytes // 8,), np.dtype(np.int64))
        for turn in range(ROUNDS):
            sent = arrays.upload(content(nbytes, comm.rank, turn))
            requests = [transport.irecv(received, left, 0, turn), transport.isend(sent, right, 0, turn)]
            for request in requests:
                wait_for(request, "a neighbour in the probe")
            wrong += not np.array_equal(arrays.download(received), content(nbytes, left, turn))
            transport.retire(received)
    transport.close()
    print(f"rank {comm.rank}: {WRONG if wrong else WORKS}", flush=True)


def content(nbytes: int, rank: int, turn: int) -> np.ndarray:
    """Return what a rank sends: no two messages are alike."""
    return np.arange(nbytes // 8, dtype=np.int64) * 1_000_003 + 7919 * rank + 104_729 * turn


def main() -> None:
    """Run one rank of the job."""
    faulthandler.enable()
    comm = runtime.world()
    print(f"{STARTED} {comm.rank} of {comm.size}", flush=True)
    select_device("cuda", comm)
    exchange(comm)


if __name__ == "__main__":
    sys.exit(run_or_abort(main))


# -- The environment of an MPI job that a rank of another job starts --------------------------------------------------
#
# A process that inherits what a launcher told its parent believes that it belongs to the parent's job.


# What launchers tell each process about its job, as beginnings of variables. Settings of a user's, such as
# OMPI_MCA_pml, and what SLURM tells about an allocation, such as SLURM_JOB_ID, are not among them.
LAUNCHER_PREFIXES = tuple(
    """PMI_ PMIX_ OMPI_COMM_ OMPI_UNIVERSE OMPI_APP_CTX OMPI_FIRST_RANKS OMPI_FILE_LOCATION OMPI_MCA_ess OMPI_MCA_orte
    OMPI_MCA_pmix PRTE_LAUNCHED HYDI_ HYDRA_ MPI_LOCAL MPIEXEC_ MV2_COMM_ FLUX_TASK_ PALS_ SLURM_STEP SLURM_PROCID
    SLURM_LOCALID SLURM_NODEID SLURM_TASK_PID SLURM_GTIDS SLURM_NTASKS SLURM_NPROCS SLURM_SRUN_COMM SLURM_LAUNCH_NODE
    SLURM_UMASK SLURM_CPU_BIND SLURM_DISTRIBUTION SLURM_MPI_TYPE""".split()
)
# Several ranks on one small host. Each of these is read by one MPI, and ignored by the others.
ONE_HOST = {
    "HYDRA_LAUNCHER": "fork",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def environment_of_own_job(environment: Mapping[str, str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the variables for a job on this host: without what launchers told this process, and more `prefixes`."""
    left_out = (*LAUNCHER_PREFIXES, *prefixes)
    kept = {name: value for name, value in environment.items() if not name.startswith(left_out)}
    return {**ONE_HOST, **kept, **(AS_ROOT if os.geteuid() == 0 else {})}
