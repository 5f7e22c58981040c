"""How the fields of a configuration are declared."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Return a field with its help `text` and its range. `least` is in the range; `above` and `below` are not."""
    limits = {"least": least, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata={"help": text, **limits})
