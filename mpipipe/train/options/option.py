"""How the fields of a configuration are declared."""

from __future__ import annotations

import textwrap
from dataclasses import field, fields
from typing import Any


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a field with its help `text` and its range. `least` is in the range; `above` and `below` are not.

    `metavar` stands for the value in the help of the command line.
    """
    limits = {"least": least, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata={"help": text, "metavar": metavar, **limits})


def parameters_of(config: type) -> str:
    """Return the section Parameters of the docstring of a dataclass, from the help texts of its fields."""
    lines = ["Parameters", "----------"]
    for entry in fields(config):
        default = "" if entry.default is None else f", default {entry.default!r}"
        kind = str(entry.type).replace(" | None", ", optional")
        lines += [f"{entry.name} : {kind}{default}", f"    {entry.metadata['help']}"]
    return textwrap.indent("\n".join(lines), "    ") + "\n\n"
