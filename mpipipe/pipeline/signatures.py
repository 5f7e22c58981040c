"""Optional parameters of a user's functions: a function is given only those that it has."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any


def takes_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name; False for a function without a signature."""
    try:
        return name in signature(function).parameters
    except (TypeError, ValueError):  # not a function, or a function without a signature
        return False
