"""mpipipe info: what a run finds on this machine."""

from __future__ import annotations

import json
import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated

from mpipipe import __version__, arrays, environment, nn
from mpipipe.attention import kernels
from mpipipe.cli.output import show
from mpipipe.comm import describe, mesh
from mpipipe.errors import BackendError, MismatchError, MpipipeError
from mpipipe.job import (
    Communicator,
    cores_text,
    group_of,
    inprocess,
    parse_cores,
    rank_list,
    runtime,
)
from mpipipe.options import Option, Values
from mpipipe.text import counted

# Of a terminal that is wide enough for all lines.
COLUMNS = 100
REMEDY = (
    "bind ranks to more cores (--cpus-per-task of srun, PE= or core:N of mpiexec), or lower "
    "MPIPIPE_THREADS"
)
REPORT = "Send these lines, the command, the whole error, and config.toml of the run."


def info(
    as_json: Annotated[
        bool,
        Option("print what train writes as environment.json, and nothing else", names=("--json",)),
    ] = False,
) -> None:
    """Show MPI, ranks, hosts, cores, GPUs and versions (mpiexec -n 2 python -m mpipipe info)."""
    if as_json:
        try:
            surroundings = environment.gather()
        except MpipipeError:
            surroundings = _alone()
        if surroundings is not None:
            show(json.dumps(surroundings, indent=2) + "\n")
        return
    facts = {"mpipipe": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    root = True
    placement: list[str] = []
    try:
        facts |= describe.describe()
        root = runtime.mpi().COMM_WORLD.rank == 0
        placement = _placement(runtime.world())
        facts["NCCL"] = describe.nccl(runtime.world())
        surroundings = environment.gather(gpus=False)
    except MpipipeError as error:
        facts["MPI"] = f"{facts.get('MPI', '')}\n{error}".strip()
        surroundings = _alone(gpus=False)
    facts |= {"numpy": metadata.version("numpy"), "BLAS": _blas()}
    facts["devices"] = "\n".join(["cpu", *arrays.describe_gpus(), *placement])
    facts |= {
        "CuPy": _cupy(),
        "GPU toolkit": _toolkit(),
        "attention by": kernels.describe(),
        "halves": nn.kernels.describe(),
    }
    if root and surroundings is not None:
        _show(facts | described(surroundings) | {"bug report": REPORT})


def _alone(gpus: bool = True) -> Values | None:
    """Return the environment of this process, without MPI."""
    return inprocess.run(1, lambda comm: environment.gather(comm, gpus))[0]


def described(surroundings: Values) -> dict[str, str]:
    """Return cores, threads and free memory in words, and warnings about the placement."""
    cores = []
    for place in surroundings["binding"]:
        cores.append((place["rank"], f"{place['cores'] or 'not known'} on {place['host']}"))
    memory = []
    for host in surroundings["hosts"]:
        if host["free_memory"] is not None and host["memory"] is not None:
            free = host["free_memory"] / 2**30
            memory.append(f"{host['host']}: {free:.1f} of {host['memory'] / 2**30:.1f} GiB")
    facts = {
        "cores": "\n".join(rank_list.grouped(cores)),
        "threads": "\n".join(_threads(surroundings)),
        "free memory": "\n".join(memory) or "not known",
    }
    crowded = surroundings["oversubscribed"]
    warnings = [crowded and f"{crowded}: {REMEDY}", _idle(surroundings)]
    if any(warnings):
        facts["warning"] = "\n".join(filter(None, warnings))
    return facts


def _threads(surroundings: Values) -> Iterator[str]:
    """Yield for each host the ranks and threads of a training, and the cores that they share."""
    for host, places in _by_host(surroundings):
        sizes = sorted(Counter(place["threads"] for place in places).items())
        texts = []
        for threads, n in sizes:
            texts.append(f"{counted(n, 'rank')} x {counted(threads, 'thread')}")
        used = frozenset().union(*(parse_cores(place["cores"]) for place in places))
        where = "cores that are not known"
        if used:
            where = f"{cores_text(sorted(used))}: {len(used)} of {host['cores']} cores"
        yield f"{host['host']}: {' and '.join(texts)} in train, on {where}"


def _by_host(surroundings: Values) -> Iterator[tuple[Values, list[Values]]]:
    """Yield each host and the binding of its ranks."""
    for host in surroundings["hosts"]:
        yield host, [place for place in surroundings["binding"] if place["host"] == host["host"]]


def _idle(surroundings: Values) -> str | None:
    """Warn where ranks are pinned to one core each, and more than half of the cores are idle."""
    for host, places in _by_host(surroundings):
        cores = [parse_cores(place["cores"]) for place in places]
        used = frozenset().union(*cores)
        pinned = all(len(of_rank) == 1 for of_rank in cores)
        if pinned and 2 * len(used) <= (host["cores"] or 0):
            return (
                f"each rank on {host['host']} is pinned to one core, and all of them use "
                f"{len(used)} of {host['cores']}: see --cpus-per-task of srun, --bind-to of mpiexec"
            )
    return None


def _placement(comm: Communicator) -> list[str]:
    """List the GPU that each rank would take, or why they cannot; empty if no rank sees one."""
    group = group_of(comm)
    if not group.agree("info: the GPUs", values=[arrays.device_count()]).any():
        return []
    try:
        return mesh.describe(group, mesh.select_device("auto", comm))
    except (BackendError, MismatchError) as error:
        return [error.message]


def _cupy() -> str:
    """Describe CuPy: its version, or why it cannot be used."""
    try:
        library = arrays.cupy()
        library.cuda.runtime.getDeviceCount()
    except BackendError as error:
        return str(error.__context__ or error)
    except RuntimeError as error:
        return f"{library.__version__}, and no GPU can be used ({error})"
    return library.__version__


def _toolkit() -> str:
    """Describe the parts of CUDA that kernels need: found, or a line for each that is missing."""
    if not arrays.device_count():
        return "not looked for: no GPU"
    if arrays.is_amd():
        return arrays.AMD_UNTRIED
    return "\n".join(arrays.missing_parts()) or "compiler, headers and cuBLAS work"


def _blas() -> str:
    """List the BLAS libraries of numpy, with their threads before `train` and `run` set one."""
    import numpy  # noqa: F401  (what it loads is looked for)

    texts = []
    for pool in environment.blas():
        threads = counted(pool["threads"], "thread")
        texts.append(f"{pool['library']} {pool['version']} ({pool['kernels']}), {threads}")
    return ", ".join(texts)


def _show(facts: dict[str, str]) -> None:
    """Show names and values in two columns; a value that is too long goes on below itself."""
    width = max(map(len, facts)) + 2
    # Between words alone: a path can be copied.
    fold = textwrap.TextWrapper(
        COLUMNS - width, break_long_words=False, break_on_hyphens=False
    ).wrap
    lines = []
    for name, value in facts.items():
        head = name
        for line in str(value).split("\n"):
            for part in fold(line) or [""]:
                lines.append(f"{head:<{width}}{part}\n")
                head = ""
    show("".join(lines))
