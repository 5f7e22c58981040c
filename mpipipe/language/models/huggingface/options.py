"""Options of a config.json: each is read, known to be without effect, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.options import Values

CONFIG = "config.json"
MOST_BYTES = 16 << 20  # bytes of a config.json
REQUIRED = object()
REMEDY = (
    "docs/model-folders.md lists what is read of a model, and docs/finetuning.md of an adapter; "
    "one with other options needs the library that it was made for"
)


def read_json(path: Path, remedy: str) -> Values:
    """Read a JSON object; raise ConfigError, which names the file, where there is none."""
    try:
        with files.reading(f"{path.name} of a model folder", path, ConfigError, remedy=remedy):
            content = json.loads(files.read_text(path, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.name} of a model folder is no JSON: {error}"[:300], found=str(path)
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} of a model folder is no JSON object", found=str(path))
    return content


class Options:
    """The options of a config.json, or of the object `inside` it.

    `finish` refuses every option that was not read.
    """

    def __init__(self, values: dict[str, object], path: Path, inside: str = "") -> None:
        self.values = values
        self.path = path
        self.inside = inside
        self.left = dict(values)

    def error(
        self, key: str, expected: str, message: str = "has a value that cannot be used"
    ) -> ConfigError:
        """Make the error for an option."""
        name = key
        if self.inside:
            name = f"{self.inside}.{key}"
        if key in self.values:
            text = f"{name} = {self.values[key]!r:.120}"
        else:
            text = f"no {name}"
        return ConfigError(
            f"the option {name} of a model folder {message}",
            found=f"{text} in {self.path}",
            expected=expected,
            remedy=REMEDY,
        )

    def take(self, key: str, default: object = None) -> Any:
        """Return whatever an option has; `default` if it is missing, and not required."""
        if key not in self.values and default is REQUIRED:
            raise self.error(key, "a value", "is missing")
        self.left.pop(key, None)
        return self.values.get(key, default)

    def count(self, key: str, default: object = REQUIRED, least: int = 1) -> Any:
        """Return an integer of at least `least`; `default` where it is missing or null."""
        value = self.take(key, default)
        if value is default or (value is None and default is not REQUIRED):
            return default
        if type(value) is not int or not least <= value < 2**62:
            raise self.error(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: object = REQUIRED, above: float = 0.0) -> Any:
        """Return a finite number above `above`; `default` where it is missing or null."""
        value = self.take(key, default)
        if value is default or (value is None and default is not REQUIRED):
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not value > above:
            raise self.error(key, f"a number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.take(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Refuse any value but these; the option may be missing."""
        value = self.take(key, allowed[0])
        if not any(type(value) is type(other) and value == other for other in allowed):
            words = " or ".join(json.dumps(other) for other in allowed)
            raise self.error(
                key, words, "has a value that changes the result and that is not supported"
            )

    def ignore(self, keys: Iterable[str]) -> None:
        """Pass over options without effect."""
        for key in keys:
            self.left.pop(key, None)

    def finish(self, known_as: str) -> None:
        """Refuse the first option that was not asked for."""
        for key in self.left:
            raise self.error(key, f"an option of {known_as} that is known here", "is not known")
