"""How a command ends when it cannot do what was asked: one report, and the exit code of wrong usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpipipe.comm.abort import Stop
from mpipipe.comm.report import AGREED, describe
from mpipipe.errors import MpipipeError

WRONG_USAGE = AGREED  # exit code: all ranks of a job end with the same error


@contextmanager
def refusing(outcome: str) -> Iterator[None]:
    """Report an error inside the block, and end the program; `outcome` says what was not done."""
    try:
        yield
    except MpipipeError as error:
        raise Stop(describe(error, f"mpipipe: {outcome}"), WRONG_USAGE) from error
