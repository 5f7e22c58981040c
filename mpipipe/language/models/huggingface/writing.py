"""A model written as a folder that `transformers` opens, by one process.

A file has a group of parameters, model-00001-of-00003.safetensors and so on, and
model.safetensors.index.json says which tensors; a single file is called model.safetensors and has
no index. The folder gets its name when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from mpipipe import arrays, files
from mpipipe.arrays import Array
from mpipipe.checkpoint import Planned, replacing, write_tensors
from mpipipe.errors import NonFiniteError, StorageError
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.families import Family, expressed
from mpipipe.language.models.huggingface.folder import INDEX, Origin, count_not_finite
from mpipipe.language.models.huggingface.names import Tensor, parts_of, shape_of, view
from mpipipe.language.models.huggingface.options import CONFIG
from mpipipe.options import Values

FLOATS = ("float32", "bfloat16", "float16", "float64")
SHARD_BYTES = 5_000_000_000
# Without these the library takes ids of its own.
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
METADATA = {"format": "pt"}  # without it `transformers` does not open a file
ReadGroup: TypeAlias = "Callable[[Values], Mapping[str, Array]]"


def config_of(model: GPT, dtype: str, origin: Origin) -> tuple[Family, Values]:
    """Return the family that can express a model, and its config.json.

    `origin` has options without effect. Raises ConfigError where no family can.
    """
    family, options = expressed(model, origin.family)
    config = {"architectures": [family.architecture], "model_type": family.name, **NO_TOKENS}
    if family.name == "gpt2":  # its default dropout is not 0
        config |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": model.dropout}
    config |= {**origin.carried, **options, "torch_dtype": dtype}
    longest = origin.config.get("max_position_embeddings")
    if type(longest) is int and "max_position_embeddings" in options:
        config["max_position_embeddings"] = max(longest, model.seq_len)
    return family, config


def save(
    target: Path,
    model: GPT,
    groups: Sequence[Values],
    read: ReadGroup,
    *,
    dtype: str,
    origin: Origin,
) -> None:
    """Write a folder, with a file for each group of parameters.

    Parameters
    ----------
    target : Path
        The folder, new or empty.
    model : GPT
        The description.
    groups : sequence of mappings
        The names of all parameters in the model, in groups; slices of a head are in one.
    read : callable
        Returns the arrays of such a group by name; `dict`, where the groups have them.
    dtype : str
        Of the files: float32, bfloat16, float16 or float64.
    origin : Origin
        Where the model comes from: the options without effect, and the files that are copied.

    Raises
    ------
    ArgumentError, NonFiniteError, StorageError
        The target is not empty, or no family can express the model; a value is not finite in the
        dtype; files cannot be written. Nothing is left after an error.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from mpipipe import attention, nn
    >>> from mpipipe.language.models import GPT, huggingface
    >>> model, folder = GPT(dim=16, layers=2, heads=2), Path(tempfile.mkdtemp(), "model")
    >>> stage = nn.Stage(model.build(attention.Local()))
    >>> origin = huggingface.Origin()
    >>> huggingface.save(folder, model, [stage.parameters], dict, dtype="bfloat16", origin=origin)
    >>> found = huggingface.open_folder(folder)
    >>> found.family.architecture, found.model.layers, huggingface.read(found, stage.parameters)
    ('LlamaForCausalLM', 2, 35040)
    """
    family, config = config_of(model, dtype, origin)
    stored = {part.ours for part in parts_of(family.table, model)}
    groups = [group for group in groups if not stored.isdisjoint(group)]
    places = {}
    total = 0
    with replacing(target, None, explained, replaces=False) as unnamed, explained(target):
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            if len(groups) == 1:
                name = "model.safetensors"
            tensors = outgoing(family, model, read(group), arrays.dtype(dtype))
            written = write_tensors(unnamed / name, tensors, metadata=METADATA)
            for theirs, entry in written.arrays.items():
                places[theirs] = name
                total += entry.nbytes
        origin.copy(unnamed)
        if len(groups) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_json(unnamed / INDEX, index)
        write_json(unnamed / CONFIG, config)


def explained(target: Path) -> AbstractContextManager[None]:
    """Turn an OSError into a StorageError with the remedy."""
    return files.writing(
        "the model folder",
        target,
        error=StorageError,
        expected="a folder with room, on a file system that all ranks share",
        remedy="make room, or choose another folder",
    )


def write_json(path: Path, facts: Values) -> None:
    """Write a JSON object. Raises OSError."""
    files.write_whole(path, (json.dumps(facts, indent=2) + "\n").encode())


def outgoing(
    family: Family, model: GPT, ours: Mapping[str, Array], dtype: np.dtype
) -> dict[str, Planned]:
    """Return the tensors of these parameters by name; each is made when it is written."""
    parts: dict[str, list[Tensor]] = {}
    for part in parts_of(family.table, model):
        if part.ours in ours:
            parts.setdefault(part.theirs, []).append(part)

    def make(several: Sequence[Tensor]) -> np.ndarray:
        made = [converted(part, ours[part.ours], dtype, model) for part in several]
        if len(made) == 1:
            return made[0]
        return np.concatenate(made)

    tensors = {}
    for theirs, several in parts.items():
        first = several[0]
        shape = shape_of(first, ours[first.ours].shape, model)
        tensors[theirs] = Planned(dtype, shape, partial(make, several))
    return tensors


def converted(part: Tensor, array: Array, dtype: np.dtype, model: GPT) -> np.ndarray:
    """Return the values of one of their tensors, contiguous and in the dtype of the file."""
    host = arrays.download(array)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(view(part, host, model), dtype=dtype)
    count = count_not_finite(values.astype(np.float32) if arrays.is_half(dtype) else values)
    if count:
        raise NonFiniteError(
            f"parameter {part.ours} cannot be written as {dtype.name}",
            found=f"{count} values that are NaN or infinite, or too large for it",
            expected="finite numbers",
            remedy="choose bfloat16 or float32 if they are too large for float16",
        )
    return values
