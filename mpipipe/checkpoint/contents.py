"""What a checkpoint holds of a rank: parameters and the state of an optimizer, by their names in the whole model."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint.adapter import arrays_of
from mpipipe.checkpoint.tensors import check_storable
from mpipipe.errors import ArgumentError
from mpipipe.optim.named import same_name

PARAMETERS = "parameters"


Storable: TypeAlias = Any
"""A stage as far as a checkpoint knows it: nn.Stage, or a stage of your own.

It has `parameters`, arrays by their names in the whole model, which are set in place; or, in their stead,
`state_dict()`, which returns such arrays, and `load_state_dict(arrays)`, which takes them.
"""


class Optimizer(Protocol):
    """An optimizer as far as a checkpoint knows it: optim.AdamW, optim.SGD, or one of your own."""

    steps: int

    def named_state(self) -> dict[str, dict[str, Array]]:
        """Return {kind: {name of a parameter: array}}, to be set in place."""


def contents_of(stages: Sequence[Storable], optimizer: Optimizer | None) -> dict[str, Array]:
    """Return all arrays of this rank as "parameters/0.weight", "first/0.weight", ...

    Complex ones are pairs of real ones, (..., 2). Raises ArgumentError for two of one name, and for arrays that cannot
    be stored.
    """
    found: dict[str, Array] = {}
    for stage in stages:
        for name, array in arrays_of(stage).items():
            if f"{PARAMETERS}/{name}" in found:
                raise same_name(name)
            found[f"{PARAMETERS}/{name}"] = array
    for kind, states in {} if optimizer is None else optimizer.named_state().items():
        found.update({f"{kind}/{name}": array for name, array in states.items()})
    for name, array in found.items():
        if array.flags.c_contiguous:
            found[name] = arrays.as_reals(array)
        check_storable(name, found[name])
    return found


def shares(contents: Mapping[str, Array], writers: int) -> list[dict[str, Array]]:
    """Deal arrays to so many writers for about equal bytes: each to the one that has fewest, the largest first."""
    dealt: list[dict[str, Array]] = [{} for _ in range(writers)]
    heap = [(0, writer) for writer in range(writers)]
    for name, array in sorted(contents.items(), key=lambda entry: -entry[1].nbytes):
        size, writer = heapq.heappop(heap)
        dealt[writer][name] = array
        heapq.heappush(heap, (size + array.nbytes, writer))
    return dealt


def check_plain(value: Any, place: str = "state") -> None:
    """Raise ArgumentError for what JSON would not give back as it is."""
    if isinstance(value, dict):
        for key, part in value.items():
            if type(key) is not str:
                raise ArgumentError(f"a key of {place} is no string", found=repr(key)[:80])
            check_plain(part, f"{place}[{key!r}]")
    elif type(value) is list:
        for index, part in enumerate(value):
            check_plain(part, f"{place}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ArgumentError(
            f"{place} is not plain",
            found=type(value).__name__,
            expected="dicts with strings as keys, lists, strings, numbers, booleans and None",
            remedy="convert it; arrays belong into stages",
        )


def state_of(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the caller's plain state. Raises ArgumentError if it is not plain."""
    copied = dict(state or {})
    check_plain(copied)
    result: dict[str, Any] = json.loads(json.dumps(copied))
    return result
