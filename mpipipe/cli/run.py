"""mpipipe run: a user's script, in which an error on one rank ends the whole job."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import Annotated

from mpipipe import processor
from mpipipe.cli.flags import Operand
from mpipipe.cli.output import WRONG_USAGE
from mpipipe.job import Stop, run_or_abort
from mpipipe.options import Option


def run(
    target: Annotated[str, Operand("script, or module with -m")],
    arguments: Annotated[list[str] | None, Operand("for the script", rest=True)] = None,
    module: Annotated[bool, Option("TARGET is a module, as for python -m", names=("-m",))] = False,
) -> int:
    """Run a Python script on every rank (mpiexec -n 4 python -m mpipipe run script.py).

    An exception, an exit or an interrupt on one rank ends the whole job within seconds. One report
    names the rank and the place. An exit code on which all ranks agree is passed on.
    """

    def work() -> None:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(target))
        found: object = os.path.exists(target)
        if module:
            found = importlib.util.find_spec(target.partition(".")[0])
        if not found:
            raise Stop(f"mpipipe: cannot run {target}: it is not there\n", WRONG_USAGE)
        processor.prepare_process()
        sys.argv = [target, *(arguments or [])]
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")

    return run_or_abort(work)
