"""The parameters of a command: those of its function, with `Option` or `Operand`, and fields of a
configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mpipipe.errors import ConfigError
from mpipipe.options import Option, kinds_of, option_of

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Operand:
    """A parameter that is given by position. A list takes one or more values, or any number if it
    has a default.
    """

    text: str  # what it means, for the help
    metavar: str | None = None  # its name in the help; by default that of the parameter in capitals
    rest: bool = False  # take all that follows, flags too
    after_dashes: bool = False  # take what follows `--`, and nothing else


@dataclass(frozen=True)
class Argument:
    """One parameter of a command."""

    name: str
    kind: type  # str, int, float, bool or Path; of a list, that of its elements
    many: bool  # whether it is a list
    default: Any  # or REQUIRED
    flag: Option | Operand


def parameters_of(command: Callable[..., Any]) -> list[Argument]:
    """Return the parameters of a command: those of the function, or those that its attribute
    `parameters` lists.
    """
    listed = getattr(command, "parameters", None)
    if listed is not None:
        return list(listed)
    hints = get_type_hints(command, include_extras=True)
    entries = inspect.signature(command).parameters.values()
    return [
        _parameter(entry, hints[entry.name])
        for entry in entries
        if entry.kind is not entry.VAR_KEYWORD
    ]


def _parameter(entry: inspect.Parameter, hint: Any) -> Argument:
    flag: Option | Operand = Option()
    if get_origin(hint) is Annotated:
        hint, flag = get_args(hint)[:2]
    parts = (
        [part for part in get_args(hint) if part is not type(None)]
        if get_origin(hint) is not list
        else []
    )
    if parts:  # X | None
        hint = parts[0]
    many = get_origin(hint) is list
    return Argument(entry.name, get_args(hint)[0] if many else hint, many, entry.default, flag)


def fields_of(config: type) -> list[Argument]:
    """Return the parameters that the fields of a configuration are, under the headings of its
    parts.
    """
    kinds = kinds_of(config)
    parts = [part for part in config.__mro__ if "heading" in vars(part)]
    parameters = []
    for entry in fields(config):
        heading = next(
            vars(part)["heading"]
            for part in parts
            if entry.name in {own.name for own in fields(part)}
        )
        option = replace(option_of(entry), group=heading)
        kind = kinds[entry.name]
        parameters.append(
            Argument(
                entry.name, str if kind is tuple else kind, kind is tuple, entry.default, option
            )
        )
    return parameters


# -- Numbers with commas between them, as options of several commands have them --------------------


def numbers(option: str, text: str, kind: Callable[[str], Any] = float) -> list[Any]:
    """Read the numbers of an option; raises ConfigError if they are none."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--{option} is no list of numbers",
            found=repr(text),
            expected="a number, or several as in 4,8,16",
        ) from error
