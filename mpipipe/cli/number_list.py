"""Numbers with commas between them, as options of several commands have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpipipe.errors import ConfigError


def numbers(option: str, text: str, kind: Callable[[str], Any] = float) -> list[Any]:
    """Read the numbers of an option; raises ConfigError if they are none."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--{option} is no list of numbers", found=repr(text), expected="a number, or several as in 4,8,16"
        ) from error


def one_or_more(option: str, text: str) -> float | list[float]:
    """Read a cost: one number for all stages, or one for each of them."""
    found = numbers(option, text)
    return found[0] if len(found) == 1 else found
