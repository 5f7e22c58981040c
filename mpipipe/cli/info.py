"""mpipipe info: what a run finds on this machine."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from mpipipe.comm import runtime
from mpipipe.errors import MpipipeError


def info():
    """Show MPI, launcher, ranks, hosts, threads and versions: mpiexec -n 2 python -m mpipipe info"""
    facts = {"mpipipe": _version("mpipipe"), "python": f"{platform.python_version()} ({sys.executable})"}
    try:
        facts |= {name: value for name, value in runtime.describe().items() if name not in facts}
        root = runtime.mpi().COMM_WORLD.rank == 0
        runtime.world()
    except MpipipeError as error:
        facts["MPI"] = f"{facts.get('MPI', '')}\n{error}".strip()
        root = True
    facts |= {"numpy": _version("numpy"), "BLAS": _blas(), "devices": "cpu"}
    if root:
        _show(facts)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from its source folder"


def _blas() -> str:
    """The libraries that numpy's matrix products use, with the threads of each before `train` and `run` set one."""
    import numpy  # noqa: F401  (what it loads is what is looked for)
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return ", ".join(f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads" for pool in pools)


def _show(facts: dict[str, str]):
    width = max(map(len, facts))
    for name, value in facts.items():
        print(name.ljust(width), str(value).replace("\n", "\n" + " " * (width + 2)), sep="  ")
