"""The parameters of a command: those of its function, and fields of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mpipipe.options import Option

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Operand:
    """A parameter by position; a list takes several values, or any number if it has a default.

    Attributes
    ----------
    text, metavar : str
        What it means, and its name in the help; by default that of the parameter in capitals.
    rest : bool
        Take all that follows, flags too.
    """

    text: str
    metavar: str | None = None
    rest: bool = False


@dataclass(frozen=True)
class Argument:
    """One parameter of a command: its default may be REQUIRED.

    The kind is str, int, float, bool or Path; of a list (`many`) that of its elements.
    """

    name: str
    kind: type
    many: bool
    default: Any
    flag: Option | Operand


def parameters_of(command: Callable[..., object]) -> list[Argument]:
    """Return the parameters of a function, or those that its attribute `parameters` lists."""
    listed = getattr(command, "parameters", None)
    if listed is not None:
        return list(listed)
    hints = get_type_hints(command, include_extras=True)
    parameters = []
    for entry in inspect.signature(command).parameters.values():
        if entry.kind is not entry.VAR_KEYWORD:
            parameters.append(_parameter(entry, hints[entry.name]))
    return parameters


def _parameter(entry: inspect.Parameter, hint: Any) -> Argument:
    flag: Option | Operand = Option()
    if get_origin(hint) is Annotated:
        hint, flag = get_args(hint)[:2]
    if get_origin(hint) is not list and get_args(hint):
        # X of X | None
        hint = get_args(hint)[0]
    many = get_origin(hint) is list
    return Argument(entry.name, get_args(hint)[0] if many else hint, many, entry.default, flag)
