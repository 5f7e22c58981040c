"""The state of a module: what its forward changes besides its output, and the mode of its parts.

Statistics (batch normalisation, running means, counters) follow the forwards in the order of their
micro-batches, as in a loop of PyTorch. A forward that is run again for its backward must find the
state of the first time, and leave the state of now:

    forward 0   forward 1   forward 2   forward 0 again   backward 0
    s0 -> s1    s1 -> s2    s2 -> s3    s0, then s3
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mpipipe import arrays
from mpipipe.adapters.foreign import THREAD, StatesBefore
from mpipipe.nn import Position

Holder: TypeAlias = "MutableMapping[str, Any]"

# Attributes that every module has.
OF_PYTORCH = frozenset(vars(torch.nn.Module()))


class ModuleState:
    """The state of a module, and what it was before those forwards that will be run again."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._before = StatesBefore()

    @contextmanager
    def drawing(self, device: str, seed: int, position: Position | None) -> Iterator[None]:
        """Within, a forward of this position draws its own random numbers, and finds its state.

        In an evaluation no part is in training. Afterwards all that must not stay is put back: each
        part is as its owner had set it.
        """
        if position is None:
            yield
            return
        generator = torch.default_generator
        if device != "cpu":
            generator = torch.cuda.default_generators[arrays.current_gpu()]
        with THREAD.turn, ExitStack() as after:
            after.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed)
            if not position.training:
                for part in self._module.modules():
                    if part.training:
                        after.callback(setattr, part, "training", True)
                        part.training = False
            elif position.recompute == "later":
                latest = next(reversed(self._before.values()), None)
                self._before.note(position, ModuleSnapshot.of(self._module, latest))
            before = self._before.take(position)
            if before is not None:
                after.callback(ModuleSnapshot.of(self._module, before).restore)
                before.restore()
            yield


# -- A copy of the state ---------------------------------------------------------------------------


class Entry(NamedTuple):
    """A buffer or attribute of a module: where it is, the object, and a copy of its content."""

    holder: Holder
    key: str
    value: object
    content: object


class ModuleSnapshot(NamedTuple):
    """The state of a module at one time, and of the generators of Python and of numpy.

    `entries` have the id of their holder and their key as keys.
    """

    holders: list[Holder]
    entries: dict[tuple[int, str], Entry]
    python: tuple
    numpy: dict

    @classmethod
    def of(cls, module: torch.nn.Module, latest: ModuleSnapshot | None) -> ModuleSnapshot:
        """Take the state as it is now; what has not changed since the latest one is not copied."""
        known = {} if latest is None else latest.entries
        holders: list[Holder] = []
        for part in module.modules():
            holders += [part._buffers, vars(part)]
        entries = {}
        for holder, key, value in _state_in(holders):
            place = id(holder), key
            entry = known.get(place)
            if (
                entry is None
                or entry.value is not value
                or not _same(_content(value), entry.content)
            ):
                entry = Entry(holder, key, value, _content(value, copies=True))
            entries[place] = entry
        return cls(holders, entries, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put everything back, in the objects where it was."""
        for holder, key, _ in [*_state_in(self.holders)]:
            # A forward has made it since.
            if (id(holder), key) not in self.entries:
                del holder[key]
        for holder, key, value, content in self.entries.values():
            if holder.get(key) is not value:
                holder[key] = value
            _restore(value, content)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, np.random.Generator, random.Random)
NUMBERS = (type(None), int, float, complex, str, bytes, tuple)
STATE = (torch.Tensor, np.ndarray, *CONTAINERS, *GENERATORS, *NUMBERS)


def _state_in(holders: Iterable[Holder]) -> Iterator[tuple[Holder, str, object]]:
    """Yield what a forward may change: no modules, functions and objects, no graph."""
    for holder in holders:
        for key, value in holder.items():
            if key not in OF_PYTORCH and isinstance(value, STATE) and not _has_gradient(value):
                yield holder, key, value


def _has_gradient(value: object) -> bool:
    """True for a parameter, and for a tensor that a graph has made."""
    return getattr(value, "grad_fn", None) is not None or isinstance(value, torch.nn.Parameter)


def _content(value: object, copies: bool = False) -> Any:
    """Return what is in an object, or a copy of that; of what is no state, the object.

    A container has each item with its key and its content: others may hold the item, too.
    """
    if _has_gradient(value):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if copies else value.detach()
    if isinstance(value, np.ndarray):
        return value.copy() if copies else value
    if isinstance(value, CONTAINERS):
        items: Iterable = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, item, _content(item, copies)) for key, item in items]
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value


def _same(content: Any, other: Any) -> bool:
    if content is other:
        return True
    if isinstance(content, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and content.dtype == other.dtype
        return alike and torch.equal(content, other)
    if isinstance(content, np.ndarray):
        return np.array_equal(content, other)
    if isinstance(content, list):
        if len(content) != len(other):
            return False
        for (key, item, inner), (other_key, other_item, other_inner) in zip(content, other):
            if item is not other_item or not _same(key, other_key) or not _same(inner, other_inner):
                return False
        return True
    return isinstance(content, NUMBERS) and content == other


def _restore(value: Any, content: Any) -> None:
    """Let an object have the content that it had: it is written to only where it must be."""
    if _same(_content(value), content):
        return
    if isinstance(value, torch.Tensor):
        # Not counted as a write in place: graphs hold these tensors, and do not read them.
        value.data.copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    else:
        value.clear()
        for key, item, inner in content:
            _restore(item, inner)
            if isinstance(value, dict):
                value[key] = item
            elif isinstance(value, set):
                value.add(item)
            else:
                value.append(item)
