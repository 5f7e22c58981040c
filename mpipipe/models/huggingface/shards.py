"""Tensors written as a folder has them: which are in which file, and the files themselves.

A file is written tensor by tensor, each of them converted on its way, so no more than one is held twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import numpy as np

from mpipipe import arrays, files
from mpipipe.arrays import Array
from mpipipe.checkpoint.tensors import DTYPES
from mpipipe.errors import NonFiniteError
from mpipipe.models.gpt import GPT
from mpipipe.models.huggingface.names import Part, shape_of, view

METADATA = {"format": "pt"}  # without it `transformers` does not open a file


@dataclass(frozen=True)
class Outgoing:
    """One tensor to be written.

    Attributes
    ----------
    part : which one, and what it is of ours
    shape : of their tensor
    """

    part: Part
    shape: tuple[int, ...]


def outgoing(parts: Sequence[Part], ours: Callable[[str], tuple[int, ...]], model: GPT) -> list[Outgoing]:
    """Return tensors with their shapes; `ours` tells the shape of a parameter."""
    return [Outgoing(part, shape_of(part.tensor, ours(part.ours), model)) for part in parts]


def cut(tensors: Sequence[Outgoing], itemsize: int, most: int) -> list[list[Outgoing]]:
    """Cut tensors into files of at most `most` bytes each; a larger tensor has one for itself."""
    found: list[list[Outgoing]] = []
    size = 0
    for tensor in tensors:
        nbytes = prod(tensor.shape) * itemsize
        if not found or size + nbytes > most:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += nbytes
    return found


def file_name(number: int, total: int) -> str:
    """Return the name of a file, where numbers begin with 0."""
    return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def write(
    path: Path, tensors: Sequence[Outgoing], dtype: np.dtype, ours: Callable[[str], Array], model: GPT
) -> dict[str, int]:
    """Write a file that appears as a whole, and return the bytes of each tensor in it.

    Raises OSError, and NonFiniteError for a value that is NaN, infinite, or too large for the dtype.

    Parameters
    ----------
    path : of the file
    tensors : what is in it, in this order
    dtype : of the file
    ours : gives the parameter of a name, on the host or on a GPU
    model : whose parameters they are
    """
    sizes = [prod(tensor.shape) * dtype.itemsize for tensor in tensors]
    spans = pairwise(accumulate(sizes, initial=0))
    facts = {
        tensor.part.theirs: {"dtype": DTYPES[dtype.name], "shape": list(tensor.shape), "data_offsets": list(span)}
        for tensor, span in zip(tensors, spans)
    }
    text = json.dumps({"__metadata__": METADATA, **facts}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.whole_file(path) as file:
        position = file.write(len(text).to_bytes(8, "little")) + file.write(text)
        for tensor, size in zip(tensors, sizes):
            values = converted(tensor.part, ours(tensor.part.ours), dtype, model)
            file.write(values.reshape(-1).view(np.uint8).data)
            files.begin_writing(file, position, size)
            position += size
    return {tensor.part.theirs: size for tensor, size in zip(tensors, sizes)}


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
