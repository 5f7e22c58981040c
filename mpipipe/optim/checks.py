"""Checks of arguments that several functions make."""

from __future__ import annotations

from mpipipe.errors import ArgumentError


def check_max_norm(max_norm: float) -> None:
    """Raise ArgumentError unless it is above 0."""
    if not max_norm > 0:
        raise ArgumentError("max_norm must be above 0", found=repr(max_norm), expected="above 0")
