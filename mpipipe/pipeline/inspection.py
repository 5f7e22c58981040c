"""What check mode sees in arrays: entries that are not finite, and checksums that tell whether one was written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.wording import counted


def named_leaves(value: Any, name: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of each array in tuples, lists, dicts and dataclasses, such as ("x['mask']", array)."""
    if arrays.is_array(value):
        yield name, value
        return
    inner: list[tuple[str, Any]] = []
    if id(value) in above:
        return
    if isinstance(value, Mapping):
        inner = [(f"{name}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", None)
        inner = [(f"{name}.{keys[i]}" if keys else f"{name}[{i}]", each) for i, each in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [(f"{name}.{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    for key, each in inner:
        yield from named_leaves(each, key, (*above, id(value)))


def non_finite(value: Any, name: str) -> str | None:
    """Describe the first array in `value` that has entries which are NaN or infinite; None where all are finite."""
    for leaf, array in named_leaves(value, name):
        if not arrays.is_floating(array.dtype):
            continue
        host = _on_host(array)
        finite = np.isfinite(host)
        if not finite.all():
            first = np.unravel_index(int(np.argmin(finite)), host.shape)
            nans = int(np.isnan(host).sum())
            wrong = host.size - int(np.count_nonzero(finite))
            at = f" at [{', '.join(map(str, first))}]" if host.ndim else ""
            return (
                f"{leaf}, {_described(array)}: {wrong} of {counted(host.size, 'number')} not finite ({nans} NaN, "
                f"{wrong - nans} infinite), the first{at}: {host[first]}"
            )
    return None


class Watched(NamedTuple):
    """Arrays that must stay as they are, with their checksums.

    Attributes
    ----------
    stage, microbatch : to which they belong
    leaves : (name, array) of each
    sums : the checksum of each
    """

    stage: int | None
    microbatch: int | None
    leaves: list[tuple[str, Array]]
    sums: list[int]

    def change(self) -> str | None:
        """Describe the first array that has been written to; None where all are as they were."""
        for (name, array), before in zip(self.leaves, self.sums):
            if _checksum(array) != before:
                return f"{name}, {_described(array)}, with another checksum than before"
        return None


def watched(stage: int | None, microbatch: int | None, value: Any, name: str, without: Any = ()) -> Watched:
    """Take the checksums of the arrays in `value`, except those that share memory with an array in `without`."""
    others = [array for _, array in named_leaves(without, "")]
    leaves = [
        (leaf, array)
        for leaf, array in named_leaves(value, name)
        if not array.dtype.hasobject and not any(arrays.shares_memory(array, other) for other in others)
    ]
    return Watched(stage, microbatch, leaves, [_checksum(array) for _, array in leaves])


def _checksum(array: Array) -> int:
    return crc32(np.ascontiguousarray(_on_host(array)).reshape(-1).view(np.uint8).data)


def _on_host(array: Array) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return arrays.download(array if array.flags.c_contiguous else arrays.copy(array))


def _described(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
