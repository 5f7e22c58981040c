"""Ctrl-C: whoever stops a training is told how far it had come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def told(whereabouts: Callable[[], str]) -> Iterator[None]:
    """Give a KeyboardInterrupt within the text of `whereabouts()`, for the report of the job's end.

    Parameters
    ----------
    whereabouts : returns a line or more; called once, after the interrupt
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if not error.args:
            error.args = (whereabouts(),)
        raise
