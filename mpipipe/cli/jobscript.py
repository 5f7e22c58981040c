"""mpipipe jobscript: a job script for the scheduler of a cluster, on paper."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from typing import Annotated, Any

from mpipipe import processor
from mpipipe.cli.command_line import parser_of, program
from mpipipe.cli.flags import Operand, fields_of, parameters_of
from mpipipe.cli.jobscripts import MPIS, SCHEDULERS, Job, job_script
from mpipipe.cli.launch import run_proven
from mpipipe.cli.output import refusing, show
from mpipipe.errors import BackendError
from mpipipe.job import Stop, run_or_abort
from mpipipe.options import Option

# asks an interpreter for its MPI without initialising it: on a login node that may not be allowed
VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
FAMILIES = {"Open MPI": "openmpi", "Cray": "cray", "MPICH": "mpich", "MVAPICH": "mpich", "Intel": "mpich"}


def jobscript(
    scheduler: Annotated[str, Operand(" | ".join(SCHEDULERS))],
    options: Annotated[
        list[str] | None, Operand("options of `train`, or run SCRIPT and its arguments", after_dashes=True)
    ] = None,
    mpi: Annotated[str | None, Option("mpich | openmpi | cray; default: that of mpi4py")] = None,
    python: Annotated[str | None, Option("interpreter of the job; default: this one")] = None,
    module: Annotated[list[str] | None, Option("environment module to load; several may be given")] = None,
    **flags: Any,
) -> None:
    """Print a job script that trains, or runs a script of your own, fit to edit.

    python -m mpipipe jobscript slurm --nodes 2 --ranks-per-node 4 -- --steps 1000

    python -m mpipipe jobscript slurm --ranks-per-node 4 -- run script.py --its-own arguments
    """
    with refusing("jobscript"):
        script, options = _split(options or [])
        python = python or sys.executable
        job = Job(
            scheduler, mpi=mpi or _mpi_of(python), python=python,
            modules=tuple(module or ()), options=tuple(options), script=tuple(script), **flags,
        )  # fmt: skip
        text = job_script(job)
    show(text)


OTHERWISE = ("scheduler", "mpi", "python", "modules", "options", "script")  # fields of Job that are no such flags
_own, _fields = parameters_of(jobscript), [entry for entry in fields_of(Job) if entry.name not in OTHERWISE]
jobscript.parameters = [*_own[:2], *_fields, *_own[2:]]  # type: ignore[attr-defined]
jobscript.other_names = {"partition": "queue"}  # type: ignore[attr-defined]  # as SLURM calls it


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words for `run` and the options of `train`, one of them empty; wrong ones raise Stop now."""
    if words[:1] == ["run"]:
        parser_of(f"{program()} run", run).parse(words[1:])
        return words[1:], []
    if words:
        from mpipipe.cli.train import train  # numpy and all

        parser_of(f"{program()} train", train).parse(words)
    return [], words


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


# -- mpipipe run: a user's script, in which an error on one rank ends the whole job -----------------------------------


def run(
    target: Annotated[str, Operand("script, or module with -m")],
    arguments: Annotated[list[str] | None, Operand("for the script", rest=True)] = None,
    module: Annotated[bool, Option("TARGET is a module, as for python -m", names=("-m",))] = False,
) -> int:
    """Run a Python script on every rank (mpiexec -n 4 python -m mpipipe run script.py).

    An exception, an exit or an interrupt on one rank ends the whole job within seconds. One report names the rank and
    the place. An exit code on which all ranks agree is passed on.
    """

    def work() -> None:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(target))
        _check_there(target, module)
        processor.prepare_process()
        sys.argv = [target, *(arguments or [])]
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")

    return run_or_abort(work)


def _check_there(target: str, module: bool) -> None:
    """Raise Stop, with one line, where there is nothing to run."""
    try:
        if not module:
            os.stat(target)
            return
        why = "" if importlib.util.find_spec(target.partition(".")[0]) else "no such module"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise Stop(f"mpipipe: cannot run {target}: {why}\n", 2)


# -- mpipipe launch: starts a job; launch.py does the work -------------------------------------------------------------


def launch(
    command: Annotated[list[str], Operand("what starts the ranks, with all its words", after_dashes=True)],
    marker_folder: Annotated[str, Option("for the proof; every node has to see it", metavar="DIR")] = ".",
) -> int:
    """Start a job, and return its exit code; 0 only where all ranks have come to their end.

    An example: python -m mpipipe launch -- mpiexec -n 4 python -m mpipipe run script.py

    Rank 0 leaves a proof of the end in a file that MPIPIPE_ENDED names. Where the launcher returns 0 without it, the
    exit code is 1, and one sentence says what is known. Signals are passed on to the launcher.
    """
    return run_proven(command, marker_folder)
