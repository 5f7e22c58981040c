"""The model that a training begins from (--from): its folder gives the architecture, the weights and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mpipipe.comm.group import group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import ConfigError
from mpipipe.models import GPT, huggingface
from mpipipe.train.architecture import Architecture
from mpipipe.train.config import FROM_FOLDER, TrainConfig
from mpipipe.train.model_folder import ModelFolder, open_on_all

MAY_DIFFER = ("seq", "dropout", "max_positions")  # lengths and dropout are a training's own


@dataclass(frozen=True)
class Base:
    """The model to begin from.

    Attributes
    ----------
    folder : where it is
    model : its description
    origin : what goes along with it: its tokenizer, and options without effect
    """

    folder: ModelFolder
    model: GPT
    origin: huggingface.Origin

    def architecture(self, *, seq: int, dropout: float, **_: Any) -> GPT:
        """Return the model for sequences of a training; an `Architecture` whose sizes are those of the folder.

        Raises ArgumentError for sequences that are longer than learned positions.
        """
        return replace(self.model, seq=seq, dropout=dropout)


def find_base(config: TrainConfig, comm: Communicator) -> tuple[TrainConfig, Base | None]:
    """Open the folder to begin from, if there is one, and return the configuration with the sizes in it; collective.

    Raises, on every rank, what `open_model` raises, and ConfigError for a size in the configuration that contradicts
    the folder.
    """
    if config.from_ is None:
        return config, None
    folder, origin = open_on_all(comm, config.from_), None
    with group_of(comm).together("train: the model to begin from"):
        if comm.rank == 0:
            origin = huggingface.Origin.of(folder.path)
    origin = group_of(comm).broadcast("train: the model to begin from", origin)
    with group_of(comm).together("train: the model to begin from"):
        model = folder.model
        defaults = {entry.name: entry.default for entry in fields(config)}
        for name in FROM_FOLDER:
            value, there = getattr(config, name), getattr(model, name)
            if value not in (defaults[name], there):
                raise ConfigError(
                    f"{name} contradicts the model to begin from",
                    found=f"{name} = {value}",
                    expected=f"{there}, as in {folder.path}",
                    remedy=f"leave out {name}: the architecture comes from the folder",
                )
        return replace(config, **{name: getattr(model, name) for name in FROM_FOLDER}), Base(folder, model, origin)


def architecture_of(base: Base | None, given: Architecture) -> Architecture:
    """Return what makes the model of a training: the one that is given, unless a folder says it."""
    return given if base is None else base.architecture


def check_same_model(folder: ModelFolder, model: Any) -> None:
    """Raise ConfigError unless the weights in a folder are those of this model, and not only of its shapes."""
    there = folder.model
    for entry in fields(there):
        value = getattr(model, entry.name, entry.default)
        if entry.name not in MAY_DIFFER and value != getattr(there, entry.name):
            raise ConfigError(
                f"the weights to begin with are of a model with another {entry.name}",
                found=f"{getattr(there, entry.name)} in {folder.path}",
                expected=f"{value}, as the configuration has it",
                remedy=f"take the architecture from the folder, too: --from {folder.path}",
            )
