"""A model folder turned into one of another kind, by one process and without MPI.

Layers are read, converted and written group by group, so a model need not fit into memory. The new folder gets its name
when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path

import numpy as np

from mpipipe import arrays, checkpoint
from mpipipe.arrays import Array
from mpipipe.attention import Local
from mpipipe.checkpoint import tensor_files
from mpipipe.checkpoint.contents import PARAMETERS
from mpipipe.checkpoint.loading import read_arrays
from mpipipe.checkpoint.whole_folder import replacing
from mpipipe.errors import ConfigError
from mpipipe.language.models import GPT, huggingface, weights
from mpipipe.language.models.huggingface import writing
from mpipipe.language.models.huggingface.adapter import merge_adapter
from mpipipe.language.models.model_folder import AdaptedFolder, HuggingFaceFolder, ModelFolder, open_model

Shapes = dict[str, tuple[int, ...]]
OURS = ("float32", "float64")  # in which parameters are kept


def convert(source: str | Path, target: str | Path, dtype: str | None = None, most: int = writing.SHARD_BYTES) -> str:
    """Turn a folder of Hugging Face into one of this package, or the other way round; or merge an adapter.

    Parameters
    ----------
    source : the folder that is read: one of Hugging Face, the weights of a training, or an adapter of PEFT, which
        becomes a folder of Hugging Face with the whole model
    target : the folder that is written, new or empty
    dtype : of the new files; by default that of the old ones, and float32 for halves that become weights of this
        package
    most : bytes of a file; a larger layer has one for itself

    Returns a line about what was done. Raises ArgumentError, ConfigError, NonFiniteError or StorageError; no folder is
    left then.
    """
    target, folder = Path(target), open_model(source)
    if folder.kind == "huggingface":
        kind = _checked_dtype(dtype or folder.dtype, OURS, "weights of this package")
        _to_weights(huggingface.open_folder(folder.path), target, kind, most)
        return _line(folder, target, f"weights in {kind}")
    kind = _checked_dtype(dtype or folder.dtype, writing.FLOATS, "a folder of Hugging Face")
    origin = huggingface.Origin.of(folder.path)
    family, _ = writing.config_of(folder.model, kind, origin)
    groups = groups_of(folder.model, most, arrays.dtype(kind).itemsize)
    writing.write_alone(target, folder.model, groups, reader_of(folder), dtype=kind, origin=origin)
    return _line(folder, target, f"{family.architecture} in {kind}")


def _line(folder: ModelFolder, target: Path, what: str) -> str:
    return f"converted {folder.path} ({folder.kind}) into {target}: {what}, {folder.model.parameters:,} parameters"


def _checked_dtype(dtype: str, choices: tuple[str, ...], what: str) -> str:
    if dtype not in choices:
        raise ConfigError(f"the dtype of {what}", found=dtype, expected=" or ".join(choices))
    return dtype


def groups_of(model: GPT, most: int, itemsize: int) -> list[Shapes]:
    """Return names and shapes of the parameters, in groups of whole layers of at most `most` bytes."""
    groups: list[Shapes] = []
    size = 0
    for index, top in enumerate(model.build(Local())):
        found = {
            f"{name}.{key}": parameter.shape
            for name, layer in top.walk(str(index))
            for key, parameter in layer.declared.items()
        }
        nbytes = sum(map(prod, found.values())) * itemsize
        if not groups or size + nbytes > most:
            groups.append({})
            size = 0
        groups[-1].update(found)
        size += nbytes
    return groups


def reader_of(folder: ModelFolder) -> Callable[[Shapes], Mapping[str, Array]]:
    """Return a function that reads the parameters of a model."""
    if isinstance(folder, AdaptedFolder):
        return _merging(folder)
    if isinstance(folder, HuggingFaceFolder):
        return lambda shapes: _read_theirs(folder.folder, _empty(shapes, folder.dtype))
    saved = checkpoint.read(folder.path) if folder.kind == "checkpoint" else None

    def read(shapes: Shapes) -> Mapping[str, Array]:
        found = _empty(shapes, folder.dtype)
        if saved is None:
            weights.read_into(folder.path, found)
        else:
            read_arrays(saved, {f"{PARAMETERS}/{name}": array for name, array in found.items()})
        return found

    return read


def _merging(folder: AdaptedFolder) -> Callable[[Shapes], Mapping[str, Array]]:
    """Return a function that reads parameters of the model of an adapter, and merges the adapter into them."""
    read_plain = reader_of(folder.base)

    def read(shapes: Shapes) -> Mapping[str, Array]:
        found = read_plain(shapes)
        merge_adapter(folder.adapter, folder.family, folder.model, found)
        return found

    return read


def _read_theirs(folder: huggingface.Folder, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    huggingface.read(folder, found)
    return found


def _empty(shapes: Shapes, dtype: str) -> dict[str, np.ndarray]:
    return {name: np.empty(shape, arrays.dtype(dtype)) for name, shape in shapes.items()}


def _to_weights(folder: huggingface.Folder, target: Path, dtype: str, most: int) -> None:
    """Write the weights folder of a model of Hugging Face."""
    groups = groups_of(folder.model, most, arrays.dtype(dtype).itemsize)
    with replacing(target, None, writing.explained, replaces=False) as partial, writing.explained(target):
        sums: dict[str, str] = {}
        for number, shapes in enumerate(groups):
            found = _read_theirs(folder, _empty(shapes, dtype))
            written = tensor_files.write(partial / weights.file_of(number), found)
            sums.update({name: entry.checksum for name, entry in written.arrays.items()})
        huggingface.Origin.of(folder.path).copy(partial, keep_config=True)
        weights.write_description(partial, weights.Description(asdict(folder.model), dtype, len(groups), sums))
