"""The fields of a configuration: a dataclass of options, whose values are checked and typed.

The names of fields are the keys of its file, and with dashes its flags. Texts with a meaning of
their own, such as 1.5G for bytes, are parsed once, when a configuration is made: its fields have
typed values.
"""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import MISSING, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.options import NOUNS, Option


def option(default: object, text: str, **description: Any) -> Any:
    """Return the field of a configuration with its default, help, and Option."""
    return field(default=default, metadata={"option": Option(text, key=True, **description)})


def kinds_of(config: type) -> dict[str, type]:
    """Return int, float, bool, str or tuple for each field; texts that are parsed are str."""
    hints = get_type_hints(config)
    return {entry.name: _kind(entry, hints[entry.name]) for entry in fields(config)}


def _kind(entry: dataclasses.Field, hint: Any) -> type:
    if option_of(entry).parse is not None:
        return str
    if get_origin(hint) is tuple:
        return tuple
    for part in get_args(hint):
        if part in NOUNS:
            return part
    return hint


def option_of(entry: dataclasses.Field) -> Option:
    """Return the description of a field."""
    return entry.metadata["option"]


def key_of(entry: dataclasses.Field) -> str:
    """Return a field's name as users write it: without the `_` after a word of Python."""
    return entry.name.rstrip("_")


def read_fields(config: Any) -> None:
    """Check a new configuration, and give its values their types. Raises ConfigError."""
    kinds = kinds_of(type(config))
    for entry in fields(config):
        value = _read(entry, getattr(config, entry.name), kinds[entry.name])
        object.__setattr__(config, entry.name, value)


def _read(entry: dataclasses.Field, value: Any, kind: type) -> Any:
    """Return `value` in the field's type: a list as a tuple, an integer as a float.

    A text becomes what it means.
    """
    described = option_of(entry)
    if value is None and entry.default is None:
        return None
    if described.parse is not None and not isinstance(value, str):
        try:
            value = described.show(value)  # a value that was parsed before
        except (TypeError, ValueError, AttributeError):
            raise _wrong_type(entry, value, kind) from None
    value = _typed(entry, value, kind)
    if described.choices is not None and value not in described.choices:
        expected = " or ".join(described.choices)
        raise ConfigError(
            f"{key_of(entry)} ({described.text})", found=repr(value), expected=expected
        )
    if kind is int and described.below is None:
        described = dataclasses.replace(described, below=2**63)  # numpy and MPI count no further
    if kind in (int, float) and not described.has(value):
        raise ConfigError(
            f"{key_of(entry)} ({described.text}) is out of range",
            found=repr(value),
            expected=described.range_words,
        )
    if described.parse is None:
        return value
    try:
        return described.parse(value)
    except ArgumentError as error:
        raise ConfigError(
            f"{entry.name}: {error.message}", found=error.found, expected=error.expected
        ) from None


def _typed(entry: dataclasses.Field, value: Any, kind: type) -> Any:
    is_list = isinstance(value, (list, tuple))
    if value == "" or (kind is tuple and is_list and "" in value):
        raise ConfigError(
            f"{key_of(entry)} is empty",
            found=repr(value),
            expected="a text, or no such key",
            remedy="a variable of the shell may have no value",
        )
    if kind is tuple:
        if is_list and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:
        return value
    raise _wrong_type(entry, value, kind)


def _wrong_type(entry: dataclasses.Field, value: object, kind: type) -> ConfigError:
    return ConfigError(
        f"the type of {key_of(entry)} is wrong", found=repr(value), expected=NOUNS[kind]
    )


def written(config: Any) -> dict[str, Any]:
    """Return the values of a configuration by name, as a file has them."""
    values = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        described = option_of(entry)
        if described.parse is not None and value is not None:
            value = described.show(value)
        values[entry.name] = value
    return values


def document(config: type) -> None:
    """Put the help of the fields into a configuration's docstring, as its Parameters."""
    lines = ["Parameters", "----------"]
    for entry in fields(config):
        if entry.default in (None, MISSING):
            default = ""
        else:
            default = f", default {entry.default!r}"
        kind = str(entry.type).replace(" | None", ", optional")
        lines += [f"{entry.name} : {kind}{default}", f"    {option_of(entry).text}"]
    section = textwrap.indent("\n".join(lines), "    ") + "\n\n"
    if config.__doc__:  # python -OO has none
        config.__doc__ = config.__doc__.replace("    Raises\n", section + "    Raises\n", 1)
