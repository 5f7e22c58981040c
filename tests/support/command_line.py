"""The command line in the process of a test."""

from dataclasses import dataclass

from mpipipe.cli.command_line import execute
from mpipipe.job.exit import Stop


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and its report of an error."""

    code: int
    report: str = ""


def invoke(*words: str) -> Ended:
    """Run a command as `python -m mpipipe words` does, in this process."""
    try:
        return Ended(execute(list(words)))
    except Stop as stop:
        return Ended(stop.code, stop.text)
    except SystemExit as leaving:
        return Ended(leaving.code)
