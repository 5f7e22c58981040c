"""The configuration of a training: one dataclass, filled from defaults, a TOML file and command line flags.

Its fields are in options/, a class for each heading of `mpipipe train --help`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.text import as_word, near
from mpipipe.train.config_checks import NOUNS, PARSED, PLANNED, check_parsed, check_range, check_together, typed
from mpipipe.train.options import (
    INSTEAD,
    OTHER_NAMES,
    ClusterOptions,
    DataOptions,
    ModelOptions,
    OutputOptions,
    ParallelOptions,
    TrainingOptions,
    parameters_of,
)


@dataclass(frozen=True)
class TrainConfig(ClusterOptions, OutputOptions, TrainingOptions, ParallelOptions, ModelOptions, DataOptions):
    """The configuration of one training.

    Field names are the keys of a TOML file and, with dashes, the flags of `mpipipe train`. Every field has a default.
    The help texts of the fields below are the documentation of the parameters, too.

    Raises
    ------
    ConfigError
        For a value of the wrong type or out of its range.

    Examples
    --------
    >>> from mpipipe.train import TrainConfig
    >>> config = TrainConfig(steps=100, pipe=2, schedule="interleaved_1f1b", chunks=2)
    >>> config.lr
    0.003
    """

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            kind = KINDS[entry.name]
            value = typed(entry, getattr(self, entry.name), kind)
            check_range(entry, value, kind)
            object.__setattr__(self, entry.name, value)
        for name, parse in PARSED.items():
            check_parsed(name, getattr(self, name), parse)
        check_together(self)

    @property
    def scales_dynamically(self) -> bool:
        """Whether the loss scale is changed while the training runs, as the gradients allow."""
        return self.loss_scale == 0 or (self.loss_scale is None and self.dtype == "float16")

    @classmethod
    def load(cls, path: str | None = None, **flags: Any) -> TrainConfig:
        """Read a configuration: the keys of a file replace defaults, and flags replace keys.

        Parameters
        ----------
        path : str, optional
            A TOML file whose keys are names of fields, at its top level.
        **flags
            Values of fields by name. None stands for a flag that was not given.

        Returns
        -------
        TrainConfig
            The defaults with these replacements.

        Raises
        ------
        ConfigError
            For a file that cannot be read, an unknown key, and whatever the constructor refuses.

        Examples
        --------
        >>> from mpipipe.train import TrainConfig
        >>> TrainConfig.load(steps=100, lr=None).steps
        100
        """
        keys = {
            FIELDS.get(name, name): value for name, value in ({} if path is None else read_keys(Path(path))).items()
        }
        flags = {FIELDS.get(name, name): value for name, value in flags.items() if value is not None}
        for source, given in ((path, keys), ("the flags", flags)):
            for key in given:
                _check_known(key, source)
        given = {**keys, **flags}
        if given.get("plan") == "auto":
            given["fixed"] = (*given.get("fixed", ()), *(name for name in PLANNED if name in given))
        sizes = [name for name in FROM_FOLDER if name in given]
        if given.get("from_") is not None and sizes:
            raise ConfigError(
                f"{sizes[0]} and from are both given",
                found=f"{sizes[0]} = {given[sizes[0]]}, from {given['from_']}",
                expected="one of them: the architecture comes from the folder",
                remedy=f"leave out {' and '.join(sizes)}",
            )
        return cls(**given)


if TrainConfig.__doc__:  # python -OO has none
    TrainConfig.__doc__ = TrainConfig.__doc__.replace("    Raises\n", parameters_of(TrainConfig) + "    Raises\n", 1)

# what a folder says, with `from`
FROM_FOLDER = ("vocab", "dim", "layers", "heads", "kv_heads", "hidden", "tied", "rope_base")
FIELDS = {"from": "from_"}  # names of keys that no field can have in Python


def heading_of(name: str) -> str:
    """Return under which heading the help lists a field: data, model, parallel, ..."""
    owner = next(base for base in TrainConfig.__bases__ if name in {entry.name for entry in dataclasses.fields(base)})
    return owner.__name__.removesuffix("Options").lower()


def _kind(hint: Any) -> type:
    if get_origin(hint) is tuple:
        return tuple
    return next((part for part in get_args(hint) if part in NOUNS), hint)


# Field name -> int, float, bool, str, or tuple (of strings); a field whose default is None also takes None.
KINDS = {name: _kind(hint) for name, hint in get_type_hints(TrainConfig).items()}


def _check_known(key: str, source: str | None) -> None:
    if key in KINDS:
        return
    instead = INSTEAD.get(as_word(key))
    meant = near(key, [name.rstrip("_") for name in KINDS], OTHER_NAMES) if instead is None else []
    raise ConfigError(
        f"unknown key in {source}",
        found=key,
        expected=" or ".join(meant) if meant else ", ".join(KINDS),
        remedy=instead or "`mpipipe train --help` explains each",
    )


# -- A configuration as a file in TOML: read, and written -------------------------------------------------------------


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
