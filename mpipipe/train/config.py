"""The configuration of a training: one dataclass, filled from defaults, a TOML file and command line flags.

Its fields are in options/, a class for each heading of `mpipipe train --help`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mpipipe.errors import ConfigError
from mpipipe.train.config_checks import NOUNS, PARSED, PLANNED, check_parsed, check_range, check_together, typed
from mpipipe.train.config_file import read_keys
from mpipipe.train.options.cluster import ClusterOptions
from mpipipe.train.options.data import DataOptions
from mpipipe.train.options.model import ModelOptions
from mpipipe.train.options.option import parameters_of
from mpipipe.train.options.other_names import INSTEAD, OTHER_NAMES
from mpipipe.train.options.output import OutputOptions
from mpipipe.train.options.parallel import ParallelOptions
from mpipipe.train.options.training import TrainingOptions
from mpipipe.wording import as_word, near


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
