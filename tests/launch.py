"""Start a real MPI job from inside a test, also when pytest itself runs under mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# what a launcher tells its processes: a job that inherits it believes that it belongs to ours
LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_", "MPIEXEC_")
SETTINGS = {  # each is read by one MPI and ignored by the others
    "HYDRA_LAUNCHER": "fork",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_btl": "^ofi",  # probing libfabric costs a second at every start
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class JobTimeoutError(AssertionError):
    """A job did not end in time; the text holds what it had printed."""


def job_environment(extra=None) -> dict:
    """This process's environment without its launcher's variables, plus what each MPI needs on a small machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    env.update(SETTINGS, **(AS_ROOT if os.geteuid() == 0 else {}))
    env.pop("PYTHONUNBUFFERED", None)  # whole lines: the launcher mixes what the ranks write
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return {**env, **(extra or {})}


def mpiexec() -> str:
    """The launcher that belongs to this Python environment."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec beside python or on PATH: install mpipipe[mpich] or load an MPI module")
    return found


def run_job(ranks, what, timeout=60, env=None) -> subprocess.CompletedProcess:
    """Run `mpiexec -n ranks python ...` in an empty folder and return its exit status, stdout and stderr.

    Parameters
    ----------
    ranks : number of ranks; 0 runs python without a launcher
    what : the text of a script, or a list of arguments for python
    timeout : seconds; JobTimeoutError when the job still runs then
    env : variables to set on top of a clean environment
    """
    with tempfile.TemporaryDirectory(prefix="mpipipe-job-") as folder:
        if isinstance(what, str):
            script = Path(folder, "job.py")
            script.write_text(what)
            what = [str(script)]
        command = [sys.executable, *map(str, what)]
        if ranks:
            command = [mpiexec(), "-n", str(ranks), *command]
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=job_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            stdout, stderr = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            stdout, stderr = _end(job)
            raise JobTimeoutError(f"{' '.join(command)}: still running after {timeout} s\n{stdout}\n{stderr}") from None
        return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)


def _end(job):
    """Stop the launcher politely, so that it takes its ranks along, and return what they printed."""
    job.terminate()
    try:
        return job.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        job.kill()
        try:
            return job.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # a rank survived and keeps the pipes open
            return "", "(the output is lost: ranks outlive their launcher)"
