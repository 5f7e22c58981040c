"""The model that a training leaves in its output folder, in the format that was asked for (--save-as)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from mpipipe import nn
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.models import GPT, huggingface
from mpipipe.nn.lora import without_adapters
from mpipipe.train import weights
from mpipipe.train.base import Base
from mpipipe.train.config import TrainConfig
from mpipipe.train.huggingface_folder import INSIDE
from mpipipe.train.training_plan import TrainingPlan


def leave_model(
    out: Path, config: TrainConfig, plan: TrainingPlan, stages: Sequence[nn.Stage], mesh: Mesh, base: Base | None
) -> None:
    """Write the model; collective over the mesh.

    With --save-as mpipipe it goes to weights/, and with --save-as huggingface to huggingface/, in `out`. The tokenizer
    of the model that the training began from goes along, or else the one that was named (--tokenizer). Adapters are
    merged into it, and go to adapter/ as well. A model that the training left earlier in the other format is removed.

    Raises ArgumentError, NonFiniteError or StorageError, on every rank.
    """
    origin = origin_of(config, base)
    plan.tuning.save(out, stages, plan.model, origin, mesh)
    stages = without_adapters(stages, merged=True)
    if config.save_as == "mpipipe":
        weights.save(weights.folder_of(out), plan.model, stages, plan.schedule, mesh, origin)
        _remove(out / INSIDE, mesh)
        return
    parameters = {name: array for stage in stages for name, array in stage.parameters.items()}
    dtype = config.save_dtype or stages[0].parameters.flat.dtype.name
    huggingface.save(out / INSIDE, cast(GPT, plan.model), parameters, mesh, dtype=dtype, origin=origin, replaces=True)
    _remove(weights.folder_of(out), mesh)


def _remove(folder: Path, mesh: Mesh) -> None:
    """Remove what this training left in the other format before it was resumed: it would be taken for the newest."""
    with group_of(mesh.comm).together("train: the model in the other format"):
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def check_can_leave(config: TrainConfig, plan: TrainingPlan, base: Base | None) -> None:
    """Raise ConfigError, before a training begins, where the model cannot be written as it was asked for."""
    origin = origin_of(config, base)
    plan.tuning.check(plan.model, origin)
    if config.save_as == "huggingface":
        huggingface.config_of(cast(GPT, plan.model), config.save_dtype or "float32", origin)


def origin_of(config: TrainConfig, base: Base | None) -> huggingface.Origin:
    """Return where a model comes from. Without a base that is the folder of the tokenizer, if one was named."""
    if base is not None:
        return base.origin
    if config.tokenizer is None:
        return huggingface.Origin()
    path = Path(config.tokenizer)
    return huggingface.Origin(path if path.is_dir() else path.parent)
