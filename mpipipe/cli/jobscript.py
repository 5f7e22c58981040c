"""mpipipe jobscript: a job script for the scheduler of a cluster, on paper."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from mpipipe.cli.one_process import check_one_process
from mpipipe.comm.abort import Stop
from mpipipe.comm.report import describe
from mpipipe.errors import BackendError, MpipipeError
from mpipipe.site import MPIS, SCHEDULERS, Job, job_script

# asks an interpreter for its MPI without initialising it: on a login node that may not be allowed
VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
FAMILIES = {"Open MPI": "openmpi", "Cray": "cray", "MPICH": "mpich", "MVAPICH": "mpich", "Intel": "mpich"}
REFUSED = 2  # exit code, as of a configuration that cannot be used


def jobscript(
    scheduler: Annotated[str, typer.Argument(help=" | ".join(SCHEDULERS), show_default=False)],
    options: Annotated[
        list[str] | None, typer.Argument(help="options of `train` for the script, behind --", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(help="nodes of the job")] = 1,
    ranks_per_node: Annotated[int, typer.Option(help="ranks on each node")] = 1,
    threads: Annotated[int, typer.Option(help="cores of each rank, and threads of its matrix products")] = 1,
    gpus: Annotated[bool, typer.Option("--gpus", help="a GPU for each rank")] = False,
    time: Annotated[str, typer.Option(help="limit of the job: seconds, MM:SS, HH:MM:SS or D-HH:MM:SS")] = "00:30:00",
    preemptable: Annotated[
        bool, typer.Option("--preemptable", help="save and leave before the end, and start again until it is done")
    ] = False,
    notice: Annotated[int, typer.Option(help="seconds before the end at which a preemptable job is told")] = 120,
    array: Annotated[
        str | None, typer.Option(help="numbers of a job array as in 0-3, each a seed", show_default=False)
    ] = None,
    long_context: Annotated[
        bool, typer.Option("--long-context", help="the ranks of a node share each sequence of 65 536")
    ] = False,
    account: Annotated[str | None, typer.Option(help="account, project or bank", show_default=False)] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", "--partition", help="queue or partition", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the job", show_default=False)] = None,
    mpi: Annotated[
        str | None, typer.Option(help="mpich | openmpi | cray; default: that of mpi4py", show_default=False)
    ] = None,
    launcher: Annotated[str, typer.Option(help="under LSF: mpiexec | jsrun")] = "mpiexec",
    python: Annotated[
        str | None, typer.Option(help="interpreter of the job; default: this one", show_default=False)
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="environment module to load; several may be given", show_default=False)
    ] = None,
) -> None:
    """Print a job script that trains, fit to edit (jobscript slurm --nodes 2 --ranks-per-node 4 -- --steps 1000)."""
    try:
        check_one_process("jobscript")
        job = Job(
            scheduler, nodes, ranks_per_node, threads,
            gpus=gpus, time=time, preemptable=preemptable, notice=notice, array=array, long_context=long_context,
            account=account, queue=queue, name=name, mpi=mpi or _mpi_of(python or sys.executable), launcher=launcher,
            python=python or sys.executable, modules=tuple(module or ()), options=tuple(options or ()),
        )  # fmt: skip
        typer.echo(job_script(job), nl=False)
    except MpipipeError as error:
        raise Stop(describe(error, "mpipipe: no script is printed"), REFUSED) from error


def _mpi_of(python: str) -> str:
    """Return which of MPIS that interpreter has."""
    remedy = f"name it with --mpi: {', '.join(MPIS)}"
    try:
        asked = subprocess.run([python, "-c", VENDOR], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise BackendError(f"{python} does not say which MPI it has", found=lines[-1], remedy=remedy) from error
    vendor = asked.stdout.strip()
    for words, family in FAMILIES.items():
        if words in vendor:
            return family
    raise BackendError("which words its launcher wants is not known of this MPI", found=vendor, remedy=remedy)
