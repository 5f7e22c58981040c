"""The configuration of a training: one dataclass, filled from defaults, a TOML file and command line flags."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.options import document, key_of, read_fields
from mpipipe.schedules import is_path
from mpipipe.text import as_word, near
from mpipipe.train.options import INSTEAD, OTHER_NAMES, PLANNED, ParallelOptions, RunOptions, is_table

Config = TypeVar("Config", bound="TaskConfig")


@dataclass(frozen=True)
class TaskConfig(RunOptions, ParallelOptions):
    """The configuration of the training of any task.

    Field names are the keys of a TOML file and, with dashes, the flags of a command. Texts with a meaning of their own,
    such as a partition, may be given as texts.

    Raises
    ------
    ConfigError
        For a value of the wrong type or out of its range.
    """

    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES

    def __post_init__(self) -> None:
        read_fields(self)
        _check_together(self)

    @classmethod
    def load(cls: type[Config], path: str | None = None, **flags: Any) -> Config:
        """Read a configuration: the keys of a file replace defaults, and flags replace keys.

        Parameters
        ----------
        path : str, optional
            A TOML file whose keys are names of fields, at its top level.
        **flags
            Values of fields by name. None stands for a flag that was not given.

        Returns
        -------
        TaskConfig
            The defaults with these replacements. Raises ConfigError where the constructor does, for a file that cannot
            be read, and for an unknown key.

        Examples
        --------
        >>> from mpipipe.train import TrainConfig
        >>> TrainConfig.load(steps=100, lr=None).steps
        100
        """
        names = {key_of(entry): entry.name for entry in fields(cls)}
        keys = {} if path is None else read_keys(Path(path))
        flags = {name: value for name, value in flags.items() if value is not None}
        values: dict[str, Any] = {}
        for source, part in ((path, keys), ("the flags", flags)):
            for key, value in part.items():
                name = names.get(key, key)
                if name not in names.values():
                    raise cls._unknown_key_error(key, source)
                values[name] = value
        if values.get("plan") == "auto":
            values["fixed"] = (*values.get("fixed", ()), *(name for name in PLANNED if name in values))
        cls._check_given(values)
        return cls(**values)

    @classmethod
    def _check_given(cls, values: dict[str, Any]) -> None:
        """Raise ConfigError for values that cannot be given together, whatever they are."""

    @classmethod
    def _unknown_key_error(cls, key: str, source: str | None) -> ConfigError:
        names, instead = {key_of(entry): entry.name for entry in fields(cls)}, INSTEAD.get(as_word(key))
        meant = near(key, names, cls.other_names) if instead is None else []
        return ConfigError(
            f"unknown key in {source}",
            found=key,
            expected=" or ".join(meant) or ", ".join(names.values()),
            remedy=instead or "`mpipipe train --help` explains each",
        )


document(TaskConfig)


def _check_together(config: TaskConfig) -> None:
    """Raise ConfigError for values that contradict each other, or that no range tells."""
    if config.watchdog is not None and 0 < config.watchdog < 1:
        raise ConfigError("watchdog is too short", found=config.watchdog, expected="0, or at least 1")
    if config.loss_scale is not None and 0 < config.loss_scale < 1:
        raise ConfigError("loss_scale shrinks gradients", found=config.loss_scale, expected="0, or at least 1")
    if config.resume == "auto" and config.out is None:
        expected, remedy = "the folder in which to look", "name it with --out"
        raise ConfigError("resume = auto without out", expected=expected, remedy=remedy)
    init = getattr(config, "init", None)
    if config.resume not in ("auto", "no") and init is not None:
        raise ConfigError(
            "resume and init are both given",
            found=f"resume {config.resume}, init {init}",
            expected="one of them: a checkpoint that is resumed has weights",
        )
    if config.recompute and config.recompute_limit is not None:
        raise ConfigError(
            "recompute and recompute_limit are both given",
            found=f"recompute_limit {config.recompute_limit}",
            expected="one of them: recompute runs all forwards again, recompute_limit some",
        )
    strange = [name for name in config.fixed if name not in PLANNED]
    if strange:
        raise ConfigError("fixed names what no plan decides", found=strange[0], expected=" or ".join(PLANNED))
    if config.plan == "auto":
        _check_plan(config)
        return
    for name in ("memory_limit", "fixed"):
        if getattr(config, name) not in (None, ()):
            raise ConfigError(
                f"{name} without plan = auto",
                found=f"{name} {getattr(config, name)}",
                expected="none: it says which plans may be chosen",
                remedy="give plan = auto, too, or leave it out; recompute_limit limits the memory of a given schedule",
            )


def _check_plan(config: TaskConfig) -> None:
    """Raise ConfigError if options leave a plan nothing to decide."""
    for name in ("microbatches", "partition"):
        if name in config.fixed and getattr(config, name) is None:
            raise ConfigError(
                f"fixed names {name}, which has no value",
                found=f"fixed {', '.join(config.fixed)}",
                expected="options with a value, which a plan leaves as it is",
                remedy=f"give {name} a value, or leave it out of fixed",
            )
    if is_path(config.schedule) or is_table(config.schedule):
        raise ConfigError(
            "plan = auto and an order of a schedule are both given",
            found=f"schedule {config.schedule}" if is_path(config.schedule) else "a table of actions as schedule",
            expected="one of them: an order is made for its own ranks, chunks and micro-batches",
            remedy="leave out plan, or name a schedule that the package makes",
        )
    if config.survive:
        raise ConfigError(
            "plan = auto and survive are both given",
            expected="one of them: a plan is made for a number of ranks, and survive changes that",
            remedy="make a plan with `mpipipe plan`, and give its file to the training",
        )


# -- A configuration as a file in TOML: read, and written -------------------------------------------------------------


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 27  # of a file: the order of a schedule may be in it


def read_keys(path: Path) -> dict[str, Any]:
    """Return what a TOML file says. Raises ConfigError where it cannot be read, is not TOML, or has a table."""
    try:
        with files.reading("the config file", path, ConfigError, remedy="name a TOML file with --config"):
            keys = tomllib.loads(files.read_text(path, MOST_BYTES))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the config file is not TOML: {error}", found=str(path)) from error
    for name, value in keys.items():
        if isinstance(value, dict):
            known = f"{next(iter(value))} is" if value else "keys are"
            raise ConfigError(
                "the config file has a table",
                found=f"[{name}] in {path}",
                expected="keys at the top level, without tables",
                remedy=f"leave out the line [{name}]: {known} known without it",
            )
    return {name: _as_given(value) for name, value in keys.items()}


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
