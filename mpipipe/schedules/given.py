"""Arguments that have to be numbers."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from mpipipe.errors import ArgumentError


def number(name: str, value: Any) -> Any:
    """Return `value`; refuse what is no number, with the argument's name. True, text and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ArgumentError(f"{name} is no number", found=f"{name}={value!r}", expected="a number such as 4 or 2.5")
    return value


def limit(memory_limit: Any) -> Any:
    """Return a limit of memory, None if there is none; refuse what is no number."""
    return None if memory_limit is None else number("memory_limit", memory_limit)


def check_time(seconds: Any) -> None:
    """Raise ArgumentError if there is no time to search."""
    if not 0 < number("seconds", seconds) < math.inf:
        raise ArgumentError("no time to search", found=f"seconds={seconds}", expected="a finite number above 0")
