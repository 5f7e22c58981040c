"""The command line (python -m mpipipe train | plan | tokenize | generate | evaluate | convert | simulate | ...)."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer

from mpipipe import __version__
from mpipipe.cli.bench.commands import app as bench
from mpipipe.cli.convert import convert
from mpipipe.cli.draw import app as draw
from mpipipe.cli.evaluate import evaluate
from mpipipe.cli.generate import generate
from mpipipe.cli.info import info
from mpipipe.cli.jobscript import jobscript
from mpipipe.cli.plan import plan
from mpipipe.cli.run import run
from mpipipe.cli.simulate import simulate
from mpipipe.cli.tokenize import tokenize
from mpipipe.cli.train import train
from mpipipe.comm import launcher, runtime
from mpipipe.comm.abort import Stop, run_or_abort
from mpipipe.errors import BackendError

app = typer.Typer(name="mpipipe", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(train)
app.command()(plan)
app.command()(tokenize)
app.command()(generate)
app.command()(evaluate)
app.command()(convert)
app.command()(simulate)
app.command()(info)
app.command()(jobscript)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run)
app.add_typer(draw, name="draw")
app.add_typer(bench, name="bench")

UsageError: Any = typer.BadParameter.__base__  # click's own, wherever this version of typer keeps it


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mpipipe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Pipeline parallelism over MPI. Start it with mpiexec or srun (mpiexec -n 4 python -m mpipipe train)."""


def main() -> None:
    """Run the command that sys.argv names, and exit with its code.

    Wrong usage exits with 2, and one rank reports it.
    """
    if _is_job():
        sys.exit(run_or_abort(_command))
    try:
        _command()
    except Stop as stop:
        sys.stderr.write(stop.text)
        sys.exit(stop.code)


def _is_job() -> bool:
    """Whether this process is one rank of several, so that nothing may end it alone, not even wrong usage."""
    if launcher.launcher_size(os.environ) is None:
        return False
    try:
        return runtime.mpi().COMM_WORLD.size > 1
    except BackendError:
        return False


def _command() -> None:
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="python -m mpipipe", standalone_mode=False)
    except UsageError as error:
        text = io.StringIO()
        error.show(file=text)
        raise Stop(text.getvalue(), error.exit_code) from error
    if code:
        sys.exit(code)
