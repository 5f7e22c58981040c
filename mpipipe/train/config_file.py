"""A configuration as a file in TOML: read, and written."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 27  # of a file: the order of a schedule may be in it


def read_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a TOML file and their values.

    Raises ConfigError where it cannot be read, is not TOML, or has a table.
    """
    try:
        keys = tomllib.loads(files.read_text(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"the config file cannot be read: {error.strerror}",
            found=str(path),
            expected=files.REGULAR,
            remedy="name a TOML file with --config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the config file is not TOML: {error}", found=str(path)) from error
    keys = {name: _as_given(value) for name, value in keys.items()}
    for name, value in keys.items():
        if isinstance(value, dict):
            known = f"{next(iter(value))} is" if value else "keys are"
            raise ConfigError(
                "the config file has a table",
                found=f"[{name}] in {path}",
                expected="keys at the top level, without tables",
                remedy=f"leave out the line [{name}]: {known} known without it",
            )
    return keys


def _as_given(value: Any) -> Any:
    """Return a value as the command line would have given it: a name of a file in the encoding of the file system."""
    if isinstance(value, list):
        return [_as_given(each) for each in value]
    return os.fsdecode(value.encode()) if isinstance(value, str) else value


def toml_line(key: str, value: Any) -> str:
    """Return one key of a configuration and its value as a line of TOML."""
    return f"{key} = {_toml(value)}\n"


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, nan
    # strings and numbers of JSON are TOML's, but for this character, which JSON takes as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
