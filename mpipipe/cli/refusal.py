"""How a command ends that cannot do what it was asked for: one report, and the exit code of wrong usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpipipe.comm.abort import Stop
from mpipipe.comm.report import describe
from mpipipe.errors import MpipipeError

REFUSED = 2  # exit code


@contextmanager
def refusing(outcome: str) -> Iterator[None]:
    """End the program with a report for an error inside the block; `outcome` says what was not done."""
    try:
        yield
    except MpipipeError as error:
        raise Stop(describe(error, f"mpipipe: {outcome}"), REFUSED) from error
