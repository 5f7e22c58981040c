"""The command line: python -m mpipipe train | generate | info | run | bench."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from mpipipe.cli.bench.commands import app as bench
from mpipipe.cli.generate import generate
from mpipipe.cli.info import info
from mpipipe.cli.run import run
from mpipipe.cli.train import train
from mpipipe.comm import runtime

app = typer.Typer(
    name="mpipipe",
    help="Pipeline parallelism over MPI. Start it with mpiexec or srun: mpiexec -n 4 python -m mpipipe train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(generate)
app.command()(info)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run)
app.add_typer(bench, name="bench")

UsageError: Any = typer.BadParameter.__base__  # click's own, wherever this version of typer keeps it


def main():
    """Run the command that sys.argv names and exit with its code; 2 for wrong usage, which one rank reports."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="python -m mpipipe", standalone_mode=False)
    except UsageError as error:
        if _reports():
            error.show()
        code = error.exit_code
    sys.exit(code)


def _reports() -> bool:
    """Whether this process is the one rank that reports what all ranks find in their equal command lines."""
    return runtime.promised_ranks(os.environ) is None or runtime.mpi().COMM_WORLD.rank == 0
