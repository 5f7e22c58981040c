"""Trained parameters as files that any number of ranks can load, without optimizer state.

    weights/stage-0.safetensors ...  parameters of one logical stage, by their names in the model
    weights/model.json               sizes of the model, dtype, number of stages, a checksum of each
                                     parameter and one of these facts; written last

Checksums are CRC-32: they find damage, and files of two trainings that were mixed, but no forgery.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mpipipe import arrays, files, nn
from mpipipe.arrays import Array
from mpipipe.checkpoint import (
    TensorFile,
    checksum_of,
    open_tensors,
    replacing,
    write_facts,
    write_tensors,
)
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError
from mpipipe.job import group_of
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.folder import Origin, check_finite
from mpipipe.nn import announce_write
from mpipipe.options import Values
from mpipipe.schedules import Schedule

DESCRIPTION = "model.json"
MOST_BYTES = 64 << 20  # bytes of a model.json
OURS = re.compile(r"(stage-\d+\.safetensors|model\.json)(\.partial)?")
FLOATS = ("float32", "float64")  # dtypes of the parameters in files
REMEDY = "build the model with the sizes and dtype of model.json"
TRAIN_AGAIN = "train again, with a lower learning rate or clipped gradients"
COPY_AGAIN = "copy the weights again from where they are whole, or train again"


@dataclass(frozen=True)
class WeightsDescription:
    """The content of model.json: model, dtype, number of files, checksums by parameter."""

    model: Values
    dtype: str
    stages: int
    checksums: dict[str, str]


def folder_of(run: str | Path) -> Path:
    """Return the folder for the weights of the training with the output folder `run`."""
    return Path(run, "weights")


def file_of(stage: int) -> str:
    """Return the name of the file with the parameters of a stage."""
    return f"stage-{stage}.safetensors"


def save(
    folder: Path,
    model: GPT,
    stages: Sequence[nn.Stage],
    schedule: Schedule,
    mesh: Mesh,
    origin: Origin | None = None,
) -> None:
    """Write this rank's stages of `schedule`, and their description; collective over the mesh.

    A folder that is there is replaced when the new one is whole; what others have put there goes
    along, and the tokenizer of `origin`. Raises ArgumentError, on every rank, where a file cannot
    be written: the folder stays as it was.
    """
    sums: dict[str, str] = {}
    group = group_of(mesh.comm)
    with replacing(folder, group, _writing) as partial:
        with group.raise_together("saving weights"), _writing(folder):
            if mesh.replicas.rank == 0:
                partial.mkdir(parents=True, exist_ok=True)  # other hosts may not see it yet
                for stage, number in zip(stages, schedule.stages_of(mesh.pipe.rank)):
                    written = write_tensors(partial / file_of(number), stage.parameters)
                    for name, entry in written.arrays.items():
                        sums[name] = entry.checksum
        for of_rank in group.gather("saving weights: the checksums", sums):
            sums.update(of_rank)
        with group.raise_together("saving weights: their description"), _writing(folder):
            if mesh.rank == 0:
                _keep_others(folder, partial)
                if origin is not None:
                    origin.copy(partial, keep_config=True)
                dtype = stages[0].parameters.flat.dtype.name
                write_description(
                    partial, WeightsDescription(asdict(model), dtype, schedule.stages, sums)
                )


def _keep_others(folder: Path, partial: Path) -> None:
    """Copy what others have put next to the weights that are replaced. Raises OSError."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if OURS.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, partial / path.name, symlinks=True)
        elif path.is_file() or path.is_symlink():
            shutil.copy2(path, partial / path.name, follow_symlinks=False)


def write_description(folder: Path, description: WeightsDescription) -> None:
    """Write model.json, when all other files are there. Raises OSError."""
    write_facts(folder / DESCRIPTION, asdict(description))


def describe(folder: str | Path) -> WeightsDescription:
    """Read model.json. Raises ArgumentError if it is missing, or is not what `save` wrote."""
    path = Path(folder, DESCRIPTION)
    remedy = "name the --out folder of a training that ended; its weights are written at the end"
    with files.reading(
        "the weights' description",
        path,
        remedy=remedy,
        also=(ValueError, TypeError, AttributeError, RecursionError),
    ):
        facts = json.loads(files.read_text(path, MOST_BYTES))
        written = facts.pop("checksum", None)
        description = WeightsDescription(**facts)
    checksum = checksum_of(facts)
    if written != checksum:
        raise ArgumentError(
            "the weights' description is damaged",
            found=f"checksum {checksum} of {path}",
            expected=str(written),
            remedy=f"{COPY_AGAIN}; this file is not for editing",
        )
    return description


def load(folder: str | Path, stages: Sequence[nn.Stage]) -> None:
    """Set the parameters of `stages` from the files in a folder; raises what `read` raises."""
    announce_write(*stages)
    read(folder, own_arrays(stages))


def own_arrays(stages: Sequence[nn.Stage]) -> dict[str, Array]:
    """Return the parameters of this rank by name."""
    parameters: dict[str, Array] = {}
    for stage in stages:
        parameters.update(stage.parameters)
    return parameters


def read(folder: str | Path, parameters: Mapping[str, Array]) -> None:
    """Set arrays, by their names in the model, from the files of any cut into stages.

    Raises ArgumentError for a file or parameter that is missing, damaged or of another shape,
    NonFiniteError for NaN.
    """
    folder = Path(folder)
    description = describe(folder)
    left = dict(parameters)
    for number in range(description.stages):
        path = folder / file_of(number)
        with open_tensors(path, "a file of weights", "the safetensors format", COPY_AGAIN) as file:
            for name in [name for name in left if name in file.arrays]:
                array = left.pop(name)
                values = _read_one(file, name, array, description.checksums)
                if arrays.is_device(array):
                    arrays.upload(values, out=array)
                else:
                    array[...] = values
    for name, array in left.items():
        raise ArgumentError(
            f"the weights have no parameter {name}",
            found=f"{len(description.checksums)} others in {folder}",
            expected=f"{array.dtype.name}{list(array.shape)}",
            remedy=REMEDY,
        )


def _read_one(file: TensorFile, name: str, like: Array, checksums: dict[str, str]) -> np.ndarray:
    """Return the values of a parameter with the shape and dtype of `like`."""
    entry = file.arrays[name]
    if entry.kind.name not in FLOATS or entry.shape != like.shape:
        raise ArgumentError(
            f"parameter {name} does not fit the model",
            found=f"{entry} in {file.path}",
            expected=f"{like.dtype.name}{list(like.shape)}",
            remedy=REMEDY,
        )
    values = np.empty(entry.shape, entry.kind)
    checksum = file.read_summed(name, values)
    expected = checksums.get(name)
    if checksum != expected:
        raise ArgumentError(
            f"parameter {name} is damaged: it is not what was saved",
            found=f"checksum {checksum} in {file.path}",
            expected=f"{expected}, as in {DESCRIPTION}",
            remedy=COPY_AGAIN,
        )
    check_finite(values, f"parameter {name}", file.path, TRAIN_AGAIN)
    return values.astype(like.dtype, copy=False)


def copy(trained: Sequence[nn.Stage], stages: Sequence[nn.Stage]) -> None:
    """Set the parameters of `stages` on the host to those of trained ones, by name."""
    targets = own_arrays(stages)
    for source in trained:
        values = arrays.download_all(list(source.parameters.values()))
        for name, value in zip(source.parameters, values):
            targets[name][...] = value


def _writing(folder: Path) -> AbstractContextManager[None]:
    return files.writing(
        "the weights", folder, ArgumentError, remedy="make room, or choose another --out"
    )
