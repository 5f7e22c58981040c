"""A model folder turned into one of another kind, by one process and without MPI: layer groups one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Shape
from mpipipe.attention import Local
from mpipipe.checkpoint import replacing
from mpipipe.errors import ConfigError
from mpipipe.even_split import consecutive_bins
from mpipipe.language.models import huggingface, weights
from mpipipe.language.models.gpt import GPT, declared_in
from mpipipe.language.models.huggingface import writing
from mpipipe.language.models.model_folder import HuggingFaceFolder, ModelFolder, open_model


def convert(source: str | Path, target: str | Path, dtype: str | None = None, most: int = writing.SHARD_BYTES) -> str:
    """Turn a folder of Hugging Face into one of this package, or the other way round; or merge an adapter of PEFT.

    `dtype` is by default that of the old files, and float32 for halves that become weights of this package. A file has
    `most` bytes, or one layer. Returns a line about what was done. No folder is left where an error is raised.
    """
    target, folder = Path(target), open_model(source)
    ours = isinstance(folder, HuggingFaceFolder)
    kind, model, origin = dtype or folder.dtype, folder.model, huggingface.Origin.of(folder.path)
    choices = weights.FLOATS if ours else writing.FLOATS
    if kind not in choices:
        what = "weights of this package" if ours else "a folder of Hugging Face"
        raise ConfigError(f"the dtype of {what}", found=kind, expected=" or ".join(choices))
    groups = groups_of(model, most, arrays.dtype(kind).itemsize)
    if ours:
        what = f"weights in {kind}"
        with replacing(target, None, writing.explained, replaces=False) as unnamed, writing.explained(target):
            sums: dict[str, str] = {}
            for number, shapes in enumerate(groups):
                sums.update(weights.write_stage(unnamed, number, read_group(folder, kind, shapes)))
            origin.copy(unnamed, keep_config=True)
            weights.write_description(unnamed, weights.WeightsDescription(asdict(model), kind, len(groups), sums))
    else:
        what = f"{writing.config_of(model, kind, origin)[0].architecture} in {kind}"
        read = partial(read_group, folder, folder.dtype)
        writing.write_alone(target, model, groups, read, dtype=kind, origin=origin)
    return f"converted {folder.path} ({folder.kind}) into {target}: {what}, {model.parameters:,} parameters"


def read_group(folder: ModelFolder, dtype: str, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Read the parameters with these names and shapes."""
    values = {name: np.empty(shape, arrays.dtype(dtype)) for name, shape in shapes.items()}
    folder.read(values)
    return values


def groups_of(model: GPT, most: int, itemsize: int) -> list[dict[str, Shape]]:
    """Return names and shapes of the parameters, in groups of whole layers of at most `most` bytes."""
    layers = [declared_in([top], place) for place, top in enumerate(model.build(Local()))]
    sized = ((layer, sum(entry.size for entry in layer.values()) * itemsize) for layer in layers)
    return [
        {name: entry.shape for layer in group for name, entry in layer.items()}
        for group in consecutive_bins(sized, most)
    ]
