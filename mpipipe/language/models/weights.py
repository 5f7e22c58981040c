"""Trained parameters in a folder that is replaced as a whole, without optimizer state.

    weights/step-00000500/     a checkpoint, see mpipipe.checkpoint, with the sizes of the model

The tokenizer lies in there, too. Any number of ranks can load it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mpipipe import arrays, checkpoint, nn
from mpipipe.arrays import Array
from mpipipe.comm import Mesh
from mpipipe.job import group_of
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.folder import Origin
from mpipipe.language.models.huggingface.writing import explained

FOLDER = "weights"  # its name in the output folder of a training


def save(
    folder: Path,
    model: GPT,
    stages: Sequence[nn.Stage],
    mesh: Mesh,
    step: int = 0,
    origin: Origin | None = None,
) -> None:
    """Write this rank's stages, and the sizes of the model; collective over the mesh.

    A folder that is there is replaced when the new one is whole; what others have put there goes
    along, and the tokenizer of `origin`. Raises StorageError, on every rank, where a file cannot be
    written: the folder stays as it was.
    """
    group = group_of(mesh.comm)
    with checkpoint.replacing(folder, group, explained) as partial:
        state = {"model": json.loads(json.dumps(asdict(model)))}
        place = checkpoint.save(partial, mesh, stages, step=step, state=state)
        with group.raise_together("saving weights: what goes along"), explained(folder):
            if mesh.rank == 0:
                if folder.is_dir():
                    earlier = shutil.ignore_patterns("*step-*")
                    shutil.copytree(
                        folder, partial, symlinks=True, ignore=earlier, dirs_exist_ok=True
                    )
                if origin is not None:
                    origin.copy(place, keep_config=True)


def own_arrays(stages: Sequence[nn.Stage]) -> dict[str, Array]:
    """Return the parameters of this rank by name."""
    parameters: dict[str, Array] = {}
    for stage in stages:
        parameters.update(stage.parameters)
    return parameters


def copy(trained: Sequence[nn.Stage], stages: Sequence[nn.Stage]) -> None:
    """Set the parameters of `stages` on the host to those of trained ones, by name."""
    targets = own_arrays(stages)
    for name, array in own_arrays(trained).items():
        targets[name][...] = arrays.download(array)
