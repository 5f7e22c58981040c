"""Tensors of a folder, read into our arrays: each rank reads those of its parameters, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint import TensorEntry, TensorFile
from mpipipe.errors import ArgumentError
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.folder import (
    COPY_AGAIN,
    NOT_THESE,
    Folder,
    check_finite,
    opened,
)
from mpipipe.language.models.huggingface.names import Tensor, parts_of, shape_of, tied_to, view

FLOATS = ("float64", "float32", "bfloat16", "float16")


def read(folder: Folder, parameters: Mapping[str, Array]) -> int:
    """Set parameters of a model from their tensors; return how many bytes were read.

    Parameters
    ----------
    folder : Folder
        What `open_folder` returns.
    parameters : mapping of str to array
        Arrays by their names in the model, such as `Stage.parameters`, on the host or on a GPU, of
        any dtype.

    Raises
    ------
    ArgumentError, NonFiniteError
        For a tensor of another shape or dtype, a damaged file, and an unknown parameter; for NaN
        and infinity.
    """
    names: dict[
        str, list[str]
    ] = {}  # by the name that the table has: an embedding may be a head, too
    for name in parameters:
        names.setdefault(tied_to(name, folder.model), []).append(name)
    wanted = [part for part in parts_of(folder.family.table, folder.model) if part.ours in names]
    left = Counter(part.ours for part in wanted)  # tensors of each that have not been read
    missing = sorted(set(names) - set(left))
    if missing:
        raise ArgumentError(
            f"{folder.family.architecture} has no tensor for the parameter {missing[0]}",
            found=f"{len(missing)} such parameters",
            expected="parameters of models.GPT as config.json describes it",
            remedy="build the model from the description in the folder",
        )
    done = 0
    on_host: dict[
        str, list[np.ndarray]
    ] = {}  # what is being read; an array of a GPU is uploaded when it is whole
    for place in dict.fromkeys(folder.places[part.theirs][0] for part in wanted):
        with opened(folder.path / place) as file:
            for part in wanted:
                if folder.places[part.theirs][0] != place:
                    continue
                targets = [parameters[name] for name in names[part.ours]]
                if part.ours not in on_host:
                    on_host[part.ours] = list(map(host_for, targets))
                read_part(
                    file,
                    folder.places[part.theirs][1],
                    part.tensor,
                    on_host[part.ours],
                    folder.model,
                )
                left[part.ours] -= 1
                for target, host in (
                    zip(targets, on_host.pop(part.ours)) if not left[part.ours] else ()
                ):
                    if host is not target:
                        arrays.upload(host, out=target)
            done += file.bytes_read
    return done


def host_for(target: Array) -> np.ndarray:
    """Return an array on the host itself; for one of a GPU a new one, to be uploaded."""
    return np.empty(target.shape, target.dtype) if arrays.is_device(target) else target


def read_part(
    file: TensorFile, name: str, tensor: Tensor, ours: Sequence[np.ndarray], model: GPT
) -> None:
    """Set the part of our host arrays that a tensor is."""
    entry = _entry(file, name)
    expected = shape_of(tensor, ours[0].shape, model)
    if entry.kind.name not in FLOATS or entry.shape != expected:
        raise ArgumentError(
            f"the tensor {name} does not fit the model",
            found=f"{entry} in {file.path}",
            expected=f"{' or '.join(FLOATS)}, {list(expected)}",
            remedy=NOT_THESE,
        )
    views = [view(tensor, array, model) for array in ours]
    values = _values(file, name, views[0].shape, tensor.first, tensor.total)
    check_finite(values, f"the tensor {name}", file.path, COPY_AGAIN)
    for each in views:
        each[...] = values


def _entry(file: TensorFile, name: str) -> TensorEntry:
    if name not in file.arrays:
        raise ArgumentError(
            f"a file of the model folder has no tensor {name}",
            found=f"{len(file.arrays)} others in {file.path}",
            expected="what the index says",
            remedy=COPY_AGAIN,
        )
    return file.arrays[name]


def _values(
    file: TensorFile, name: str, shape: tuple[int, ...], skip: int = 0, total: int = 0
) -> np.ndarray:
    """Return a tensor of this shape, or some of its `total` rows from `skip` on.

    Halves become float32.
    """
    entry = file.arrays[name]
    row = entry.nbytes // max(1, total or shape[0])
    values = np.empty(shape, entry.kind)
    file.read_into(name, values, skip * row)
    return values.astype(np.float32) if arrays.is_half(entry.kind) else values
