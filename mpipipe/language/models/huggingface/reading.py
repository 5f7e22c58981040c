"""Tensors of a folder, read into our arrays: each rank reads those of its parameters, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint import TensorFile
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
    # By their names in the table, where a head may be the embedding, too.
    names: dict[str, list[str]] = {}
    for name in parameters:
        names.setdefault(tied_to(name, folder.model), []).append(name)
    parts: dict[str, list[Tensor]] = {}  # parts in each file
    left: Counter[str] = Counter()  # tensors of each parameter that have not been read
    for part in parts_of(folder.family.table, folder.model):
        if part.ours in names:
            left[part.ours] += 1
            parts.setdefault(folder.places[part.theirs][0], []).append(part)
    missing = sorted(set(names) - set(left))
    if missing:
        raise ArgumentError(
            f"{folder.family.architecture} has no tensor for the parameter {missing[0]}",
            found=f"{len(missing)} such parameters",
            expected="parameters of models.GPT as config.json describes it",
            remedy="build the model from the description in the folder",
        )
    done = 0
    hosts: dict[str, np.ndarray] = {}
    for place, several in parts.items():
        with opened(folder.path / place) as file:
            for part in several:
                targets = [parameters[name] for name in names[part.ours]]
                if part.ours not in hosts:
                    hosts[part.ours] = host_for(targets[0])
                stored = folder.places[part.theirs][1]
                read_part(file, stored, part, hosts[part.ours], folder.model)
                left[part.ours] -= 1
                if not left[part.ours]:
                    copy_to(targets, hosts.pop(part.ours))
            done += file.bytes_read
    return done


def host_for(target: Array) -> np.ndarray:
    """Return an array on the host itself; for one of a GPU a new one, to be uploaded."""
    if arrays.is_device(target):
        return np.empty(target.shape, target.dtype)
    return target


def copy_to(targets: Iterable[Array], host: np.ndarray) -> None:
    """Set arrays, of host or GPU, to the values of one on the host, which may be one of them."""
    for target in targets:
        if arrays.is_device(target):
            arrays.upload(host, out=target)
        elif target is not host:
            target[...] = host


def read_part(
    file: TensorFile,
    name: str,
    tensor: Tensor,
    ours: np.ndarray,
    model: GPT,
    owner: str = "",
    remedy: str = NOT_THESE,
) -> None:
    """Set the part of our host array that a tensor is."""
    entry = file.arrays.get(name)
    expected = shape_of(tensor, ours.shape, model)
    if entry is None or entry.kind.name not in FLOATS or entry.shape != expected:
        raise ArgumentError(
            f"the tensor {name}{owner} does not fit the model",
            found=f"{entry or 'none'} in {file.path}",
            expected=f"{' or '.join(FLOATS)}, {list(expected)}",
            remedy=remedy,
        )
    part = view(tensor, ours, model)
    # Of a tensor that slices of the head share, only some rows.
    row = entry.nbytes // max(1, expected[0])
    values = np.empty(part.shape, entry.kind)
    file.read_into(name, values, tensor.first * row)
    if arrays.is_half(entry.kind):
        values = values.astype(np.float32)
    check_finite(values, f"the tensor {name}", file.path, COPY_AGAIN)
    part[...] = values
