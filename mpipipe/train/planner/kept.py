"""How many bytes objects hold in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpipipe import nn


def buffers(thing: Any) -> dict[int, int]:
    """Return the bytes of each memory that arrays in `thing` lie in, by its identity; layers and stages are left out.

    Arrays are looked for in tuples, lists, mappings, and attributes of objects.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if isinstance(each, np.ndarray):
            owner = _owner(each)
            found[id(owner)] = owner.nbytes
        elif id(each) not in seen:
            seen.add(id(each))
            waiting.extend(_parts(each))
    return found


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, (tuple, list, set)):
        yield from thing
    elif not isinstance(thing, (nn.Layer, nn.Stage, type, str, bytes, int, float)) and not callable(thing):
        yield from getattr(thing, "__dict__", {}).values()
        slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from (getattr(thing, name) for name in slots if hasattr(thing, name))
