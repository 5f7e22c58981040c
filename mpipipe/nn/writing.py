"""Who reads parameters in the background is asked before they are written.

A checkpoint is read from the arrays themselves while the next step computes. Whatever writes parameters, or what an
optimizer remembers, calls `announce_write` first; whoever still reads waits there until it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Written(Protocol):
    """What has arrays that somebody may read in the background: a stage, an optimizer."""

    @property
    def before_write(self) -> list[Callable[[], object]]:
        """Functions to be called before anything is written."""


def announce_write(*several: Written) -> None:
    """Call every function that wants to know that these are about to be written."""
    for each in several:
        for function in tuple(each.before_write):
            function()
