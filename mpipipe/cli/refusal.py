"""How a command on paper ends that cannot do what it was asked for: one report, and the exit code of wrong usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpipipe.comm.abort import Stop
from mpipipe.comm.report import describe, heading
from mpipipe.errors import MpipipeError

REFUSED = 2  # exit code


@contextmanager
def refusing() -> Iterator[None]:
    """End the program for an error inside the block, with the report that ends a training on one rank."""
    try:
        yield
    except MpipipeError as error:
        raise Stop(describe(error, heading(0, 1)), REFUSED) from error
