"""A model written as a folder that `transformers` opens: by the ranks of a mesh, or by one process.

    model-00001-of-00003.safetensors    each rank writes the tensors of its own layers
    model-00002-of-00003.safetensors
    model-00003-of-00003.safetensors
    tokenizer.json, ...                 copied from the folder that the model comes from
    model.safetensors.index.json        by rank 0, when all files of tensors are there
    config.json                         the last

The folder gets its name when it is whole (checkpoint/whole_folder.py).

One file alone is called model.safetensors and has no index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays, files
from mpipipe.arrays import Array
from mpipipe.checkpoint import tensor_files
from mpipipe.checkpoint.tensor_files import Planned
from mpipipe.checkpoint.whole_folder import named_at_the_end, replacing
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import NonFiniteError, StorageError
from mpipipe.job.group import group_of
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.families import Family, expressed
from mpipipe.language.models.huggingface.folder import INDEX, Origin
from mpipipe.language.models.huggingface.names import Part, parts_of, shape_of, view
from mpipipe.language.models.huggingface.options import CONFIG

FLOATS = ("float32", "bfloat16", "float16", "float64")
SHARD_BYTES = 5_000_000_000
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # else the library takes ids of its own
DROPOUT = {"gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0}}  # where their default is another one than 0


def config_of(model: GPT, dtype: str, origin: Origin) -> tuple[Family, dict[str, Any]]:
    """Find how a model is expressed in a config.json.

    Parameters
    ----------
    model : GPT
        The description.
    dtype : str
        Of the files.
    origin : Origin
        Where the model comes from; it is asked for its family, and for options without effect.

    Returns
    -------
    family : Family
        With the class in its `architecture` and the table of names.
    options : dict
        The content of config.json.

    Raises
    ------
    ConfigError
        No family can express the model.
    """
    family, options = expressed(model, origin.family)
    dropout = {**DROPOUT["gpt2"], "resid_pdrop": model.dropout} if family.name == "gpt2" else {}
    found = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **NO_TOKENS,
        **dropout,
        **origin.carried,
        **options,
        "torch_dtype": dtype,
    }
    longest = origin.config.get("max_position_embeddings")
    if type(longest) is int and "max_position_embeddings" in options:
        found["max_position_embeddings"] = max(longest, model.seq)
    return family, found


def save(
    target: Path,
    model: GPT,
    parameters: Mapping[str, Array],
    mesh: Mesh,
    *,
    dtype: str,
    origin: Origin,
    most: int = SHARD_BYTES,
    replaces: bool = False,
) -> None:
    """Write a folder from the parameters that the ranks hold; collective over the mesh.

    Parameters
    ----------
    target : Path
        The folder, which must be new or empty unless it is to be replaced, on a file system that all hosts share.
    model : GPT
        The description.
    parameters : mapping of str to array
        Those of this rank by their names in the model; the ranks of the first replica write.
    mesh : Mesh
        All ranks.
    dtype : str
        Of the files: float32, bfloat16, float16 or float64.
    origin : Origin
        Where the model comes from: the options without effect, and the files that are copied.
    most : int
        Bytes of a file; a larger tensor has one for itself.
    replaces : bool
        Whether a folder that is there goes when the new one is whole.

    Raises
    ------
    ArgumentError
        On every rank: the target is not empty, or no family can express the model. Nothing is left after an error.
    NonFiniteError
        On every rank: a value is NaN or infinite, or too large for the dtype.
    StorageError
        On every rank: files cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from mpipipe import Mesh, attention, nn
    >>> from mpipipe.job import inprocess
    >>> from mpipipe.language.models import GPT, huggingface
    >>> model, folder = GPT(dim=16, layers=2, heads=2), Path(tempfile.mkdtemp(), "model")
    >>> stage = nn.Stage(model.build(attention.Local()))
    >>> def write(comm):
    ...     with Mesh(comm) as mesh:
    ...         origin = huggingface.Origin()
    ...         huggingface.save(folder, model, stage.parameters, mesh, dtype="bfloat16", origin=origin)
    >>> _ = inprocess.run(1, write)
    >>> found = huggingface.open_folder(folder)
    >>> found.family.architecture, found.model.layers
    ('LlamaForCausalLM', 2)
    >>> huggingface.read(found, stage.parameters)
    35040
    """
    group = group_of(mesh.comm)
    with group.raise_together("saving a model folder: its description"):
        family, config = config_of(model, dtype, origin)
    with replacing(target, group, explained, replaces) as partial:
        own = parameters if mesh.replicas.rank == 0 else {}
        with group.raise_together("saving a model folder: its files"):
            parts = [part for part in parts_of(family.table, model) if part.ours in own]
            kind = arrays.dtype(dtype)
            mine = cut(outgoing(parts, lambda name: own[name].shape, own.__getitem__, kind, model), most)
        counts = group.gather("saving a model folder: its files", len(mine))
        places: dict[str, tuple[str, int]] = {}
        with group.raise_together("saving a model folder: the tensors"), explained(target):
            if mine:
                partial.mkdir(parents=True, exist_ok=True)  # other hosts may not see it yet
            for number, tensors in enumerate(mine, sum(counts[: mesh.rank])):
                name = file_name(number, sum(counts))
                tensor_files.write(partial / name, tensors, metadata=METADATA)
                places.update({theirs: (name, size_of(tensor)) for theirs, tensor in tensors.items()})
        everywhere = group.gather("saving a model folder: the tensors", places)
        with group.raise_together("saving a model folder: its description"), explained(target):
            if mesh.rank == 0:
                whole = {name: place for part in everywhere for name, place in part.items()}
                _describe(partial, config, whole, origin)


def _describe(folder: Path, config: dict[str, Any], places: Mapping[str, tuple[str, int]], origin: Origin) -> None:
    """Write index and config.json, and copy what belongs to the model. Raises OSError."""
    origin.copy(folder)
    names = {name: file for name, (file, _) in places.items()}
    if len(set(names.values())) > 1:
        total = sum(size for _, size in places.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    _write_json(folder / CONFIG, config)


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    files.write_whole(path, (json.dumps(facts, indent=2) + "\n").encode())


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError with the remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the model folder cannot be written: {error}",
            found=str(target),
            expected="a folder with room, on a file system that all ranks share",
            remedy="make room, or choose another folder",
        ) from error


def write_alone(
    target: Path, model: GPT, groups: Sequence[Mapping[str, tuple[int, ...]]], read: Any, *, dtype: str, origin: Origin
) -> None:
    """Write a folder from one process, group of parameters by group, so that few of them are in memory at once.

    Parameters
    ----------
    target, model, dtype, origin : as in `save`
    groups : names and shapes of parameters, each group a file
    read : gives the arrays of a group
    """
    family, config = config_of(model, dtype, origin)
    kind = arrays.dtype(dtype)
    filled = [group for group in groups if any(part.ours in group for part in parts_of(family.table, model))]
    with named_at_the_end(target, explained) as partial, explained(target):
        places: dict[str, tuple[str, int]] = {}
        for number, group in enumerate(filled):
            own, name = read(group), file_name(number, len(filled))
            parts = [part for part in parts_of(family.table, model) if part.ours in group]
            tensors = outgoing(parts, group.__getitem__, own.__getitem__, kind, model)
            tensor_files.write(partial / name, tensors, metadata=METADATA)
            places.update({theirs: (name, size_of(tensor)) for theirs, tensor in tensors.items()})
        _describe(partial, config, places, origin)


# -- Tensors written as a folder has them: which are in which file, and the files themselves --------------------------
#
# A file is written tensor by tensor, each of them converted on its way, so no more than one is held twice.


METADATA = {"format": "pt"}  # without it `transformers` does not open a file


def outgoing(
    parts: Sequence[Part],
    shape: Callable[[str], tuple[int, ...]],
    ours: Callable[[str], Array],
    dtype: np.dtype,
    model: GPT,
) -> dict[str, Planned]:
    """Return tensors by their names; `shape` and `ours` give those of a parameter, the second when it is written."""
    return {
        part.theirs: Planned(
            dtype,
            shape_of(part.tensor, shape(part.ours), model),
            lambda part=part: converted(part, ours(part.ours), dtype, model),  # type: ignore[misc]
        )
        for part in parts
    }


def cut(tensors: Mapping[str, Planned], most: int) -> list[dict[str, Planned]]:
    """Cut tensors into files of at most `most` bytes each; a larger tensor has one for itself."""
    shards: list[dict[str, Planned]] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = size_of(tensor)
        if not shards or size + nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    return shards


def size_of(tensor: Planned) -> int:
    """Return the bytes of a tensor."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def file_name(number: int, total: int) -> str:
    """Return the name of a file, where numbers begin with 0."""
    return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def converted(part: Part, array: Array, dtype: np.dtype, model: GPT) -> np.ndarray:
    """Return the values of one of their tensors, contiguous and in the dtype of the file."""
    host = arrays.download(array) if arrays.is_device(array) else array
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(view(part.tensor, host, model), dtype=dtype)
    wide = values.astype(np.float32) if arrays.is_half(dtype) else values
    if wide.size and not (np.isfinite(wide.min()) and np.isfinite(wide.max())):  # NaN is both of them
        raise NonFiniteError(
            f"parameter {part.ours} cannot be written as {dtype.name}",
            found=f"{np.count_nonzero(~np.isfinite(wide))} values that are NaN or infinite, or too large for it",
            expected="finite numbers",
            remedy="choose bfloat16 or float32 if they are too large for float16",
        )
    return values
