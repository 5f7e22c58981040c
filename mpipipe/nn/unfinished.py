"""The optimizer step that a stage is in: until its end no training step and no other optimizer step may begin."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from mpipipe.errors import ArgumentError


class Update(Protocol):
    """An optimizer step that has begun."""

    @property
    def has_ended(self) -> bool: ...


def mark_begun(stages: Iterable[Any], update: Update) -> None:
    """Note that an optimizer step has begun on these stages; it itself says when it has ended."""
    for stage in stages:
        with suppress(AttributeError):  # a user's object with fixed attributes
            stage.update_begun = update


def check_finished(stage: Any, number: int | None) -> None:
    """Raise ArgumentError where an optimizer step of the stage, whose logical number is given, has not ended."""
    update: Update | None = getattr(stage, "update_begun", None)
    if update is not None and not update.has_ended:
        raise ArgumentError(
            "an optimizer step of this stage has begun, and not ended: it still needs the gradients as they are",
            stage=number,
            expected="the update finished before the next one, and before the next training step",
            remedy="call finish() of what optim.begin_step has returned; the stage has it as update_begun",
        )


def check_all_finished(stages: Iterable[Any]) -> None:
    """Raise ArgumentError where an optimizer step of any of these stages has not ended."""
    for stage in stages:
        check_finished(stage, getattr(stage, "index", None))
