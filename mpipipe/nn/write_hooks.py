"""Hooks before writes to the parameters of a stage.

A checkpoint is read from the arrays themselves while the next step computes. Whatever writes
parameters, or what an optimizer remembers, calls `announce_write` first; a checkpoint that still
reads waits there until it has read.
"""

from __future__ import annotations

from typing import Any


def announce_write(*owners: Any) -> None:
    """Call the `before_write` of stages and optimizers whose arrays are about to change."""
    for owner in owners:
        for function in tuple(owner.before_write):
            function()
