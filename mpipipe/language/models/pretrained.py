"""The model that a training begins from (--from): its folder gives the architecture, the weights and the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from mpipipe import nn
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.language.config import FROM_FOLDER, TrainConfig
from mpipipe.language.models import huggingface, weights
from mpipipe.language.models.fine_tuning import Architecture, FineTuning, Model
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.model_folder import INSIDE, ModelFolder, open_on_all
from mpipipe.language.options import DataOptions
from mpipipe.nn import without_adapters
from mpipipe.schedules import Schedule

MAY_DIFFER = ("seq", "dropout", "max_positions")  # lengths and dropout are a training's own


@dataclass(frozen=True)
class PretrainedModel:
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


def find_pretrained(config: TrainConfig, comm: Communicator) -> tuple[TrainConfig, PretrainedModel | None]:
    """Open the folder to begin from, if there is one, and return the configuration with the sizes in it; collective.

    Raises, on every rank, what `open_model` raises, and ConfigError for a size in the configuration that contradicts
    the folder.
    """
    if config.from_ is None:
        return config, None
    folder, origin = open_on_all(comm, config.from_), None
    with group_of(comm).raise_together("train: the model to begin from"):
        if comm.rank == 0:
            origin = huggingface.Origin.of(folder.path)
    origin = group_of(comm).broadcast("train: the model to begin from", origin)
    with group_of(comm).raise_together("train: the model to begin from"):
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
        return replace(config, **{name: getattr(model, name) for name in FROM_FOLDER}), PretrainedModel(
            folder, model, origin
        )


def architecture_of(base: PretrainedModel | None, given: Architecture) -> Architecture:
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


# -- The model that a training leaves in its output folder, in the format that was asked for (--save-as) --------------


def export_model(
    out: Path,
    config: TrainConfig,
    tuning: FineTuning,
    model: Model,
    schedule: Schedule,
    *,
    stages: Sequence[nn.Stage],
    mesh: Mesh,
    base: PretrainedModel | None,
) -> None:
    """Write the model; collective over the mesh.

    With --save-as mpipipe it goes to weights/, and with --save-as huggingface to huggingface/, in `out`. The tokenizer
    of the model that the training began from goes along, or else the one that was named (--tokenizer). Adapters are
    merged into it, and go to adapter/ as well. A model that the training left earlier in the other format is removed.

    Raises ArgumentError, NonFiniteError or StorageError, on every rank.
    """
    origin = origin_of(config, base)
    tuning.save(out, stages, model, origin, mesh)
    stages = without_adapters(stages, merged=True)
    if config.save_as == "mpipipe":
        weights.save(weights.folder_of(out), model, stages, schedule, mesh, origin)
        _remove(out / INSIDE, mesh)
        return
    parameters = {name: array for stage in stages for name, array in stage.parameters.items()}
    dtype = config.save_dtype or stages[0].parameters.flat.dtype.name
    huggingface.save(out / INSIDE, cast(GPT, model), parameters, mesh, dtype=dtype, origin=origin, replaces=True)
    _remove(weights.folder_of(out), mesh)


def _remove(folder: Path, mesh: Mesh) -> None:
    """Remove what this training left in the other format before it was resumed: it would be taken for the newest."""
    with group_of(mesh.comm).raise_together("train: the model in the other format"):
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def check_export(config: TrainConfig, tuning: FineTuning, model: Model, base: PretrainedModel | None) -> None:
    """Raise ConfigError, before a training begins, where the model cannot be written as it was asked for."""
    origin = origin_of(config, base)
    tuning.check(model, origin)
    if config.save_as == "huggingface":
        huggingface.config_of(cast(GPT, model), config.save_dtype or "float32", origin)


def origin_of(config: DataOptions, base: PretrainedModel | None) -> huggingface.Origin:
    """Return where a model comes from. Without a base that is the folder of the tokenizer, if one was named."""
    if base is not None:
        return base.origin
    if config.tokenizer is None:
        return huggingface.Origin()
    path = Path(config.tokenizer)
    return huggingface.Origin(path if path.is_dir() else path.parent)
