"""mpipipe launch: starts a job, and believes its exit code 0 with a proof alone. What it does is in proven_job.py."""

from __future__ import annotations

from typing import Annotated

from mpipipe.cli.flags import Flag, Operand
from mpipipe.cli.proven_job import run_proven


def launch(
    command: Annotated[list[str], Operand("what starts the ranks, with all its words", behind_dashes=True)],
    marker_folder: Annotated[str, Flag("for the proof; every node has to see it", metavar="DIR")] = ".",
) -> int:
    """Start a job, and return its exit code; 0 only where all ranks have come to their end.

    An example: python -m mpipipe launch -- mpiexec -n 4 python -m mpipipe run script.py

    Rank 0 leaves a proof of the end in a file that MPIPIPE_ENDED names. Where the launcher returns 0 without it, the
    exit code is 1, and one sentence says what is known. Signals are passed on to the launcher.
    """
    return run_proven(command, marker_folder)
