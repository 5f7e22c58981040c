"""mpipipe info: what a run finds on this machine."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from mpipipe.comm import runtime
from mpipipe.errors import MpipipeError

NARROW_KERNELS = ("Haswell", "Zen")  # OpenBLAS's names for its AVX2 kernels


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
    texts = [f"{p['internal_api']} {p['version']} ({p.get('architecture')}), {p['num_threads']} threads" for p in pools]
    if any(pool.get("architecture") in NARROW_KERNELS for pool in pools) and _has_avx512():
        texts.append("this processor has AVX-512: try OPENBLAS_CORETYPE=SkylakeX, set before Python starts")
    return ", ".join(texts)


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _show(facts: dict[str, str]):
    width = max(map(len, facts))
    for name, value in facts.items():
        print(name.ljust(width), str(value).replace("\n", "\n" + " " * (width + 2)), sep="  ")
