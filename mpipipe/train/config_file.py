"""A configuration as a file in TOML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 20  # of a file


def read_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a TOML file and their values. Raises ConfigError where it cannot be read or is not TOML."""
    try:
        return tomllib.loads(files.read_text(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"the config file cannot be read: {error.strerror}",
            found=str(path),
            expected=files.REGULAR,
            remedy="name a TOML file with --config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the config file is not TOML: {error}", found=str(path)) from error
