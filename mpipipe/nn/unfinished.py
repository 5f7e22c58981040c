"""The optimizer step that a stage is in: from its begin to its end nothing else may change the stage's gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpipipe.errors import ArgumentError


def mark_begun(stages: Iterable[Any]) -> None:
    """Note that an optimizer step has begun on these stages."""
    for stage in stages:
        _set(stage, True)


def mark_finished(stages: Iterable[Any]) -> None:
    """Note that the optimizer step of these stages has ended."""
    for stage in stages:
        _set(stage, False)


def check_finished(stage: Any, number: int | None) -> None:
    """Raise ArgumentError where an optimizer step of the stage, whose logical number is given, has not ended."""
    if getattr(stage, "update_begun", False):
        raise ArgumentError(
            "an optimizer step of this stage has begun, and not ended: it still needs the gradients as they are",
            stage=number,
            expected="the update finished before the next one, and before the next training step",
            remedy="call finish() of what optim.begin_step has returned",
        )


def _set(stage: Any, begun: bool) -> None:
    try:
        stage.update_begun = begun
    except AttributeError:  # a user's object with fixed attributes
        return
