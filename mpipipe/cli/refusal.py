"""How a command ends when it cannot do what was asked: one report, and the exit code of wrong usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpipipe.comm.abort import Stop
from mpipipe.comm.report import AGREED, describe, heading
from mpipipe.errors import MpipipeError

WRONG_USAGE = AGREED  # exit code: all ranks of a job end with the same error


@contextmanager
def refusing() -> Iterator[None]:
    """Report an error inside the block as that of a training on one rank, and end the program."""
    try:
        yield
    except MpipipeError as error:
        raise Stop(describe(error, heading(0, 1)), WRONG_USAGE) from error
