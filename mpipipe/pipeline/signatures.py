"""What a user's function can be given: parameters that it may have, and need not."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any


def takes_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name; no for one without a signature."""
    try:
        return name in signature(function).parameters
    except (TypeError, ValueError):  # no function, or one without a signature
        return False
