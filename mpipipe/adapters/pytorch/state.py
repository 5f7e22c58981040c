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
from collections.abc import MutableMapping
from contextlib import ExitStack
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

    def drawing(self, device: str, seed: int, position: Position) -> Drawing:
        """Within, a forward of this position draws its own random numbers, and finds its state."""
        generator = torch.default_generator
        if device != "cpu":
            generator = torch.cuda.default_generators[arrays.current_gpu()]
        return Drawing(self, generator, seed, position)

    def prepare(self, position: Position) -> ExitStack:
        """Let a forward find its state; what is returned puts back what must not stay.

        In an evaluation no part is in training; after it each is as its owner had set it.
        """
        after = ExitStack()
        if not position.training:
            for part in self._module.modules():
                if part.training:
                    after.callback(setattr, part, "training", True)
                    part.training = False
        elif position.recompute == "later":
            snapshot = ModuleSnapshot.of(self._module, self._before.latest)
            self._before.note(position, snapshot)
        elif position.recompute == "now":
            before = self._before.take(position)
            if before is not None:
                after.callback(ModuleSnapshot.of(self._module, before).restore)
                before.restore()
        return after


class Drawing:
    """A forward with random numbers of its own, after which the generator is as it was."""

    __slots__ = ("_after", "_before", "_generator", "_position", "_seed", "_state", "_turn")

    def __init__(
        self, state: ModuleState, generator: torch.Generator, seed: int, position: Position
    ):
        self._state = state
        self._generator = generator
        self._seed = seed
        self._position = position
        self._after: ExitStack | None = None

    def __enter__(self) -> None:
        self._turn = THREAD.turn
        self._turn.__enter__()
        self._before = self._generator.get_state()
        try:
            self._generator.manual_seed(self._seed)
            if not self._position.training or self._position.recompute:
                self._after = self._state.prepare(self._position)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._after is not None:
                self._after.close()
        finally:
            self._generator.set_state(self._before)
            self._turn.__exit__(None, None, None)


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
        known = {}
        if latest is not None:
            known = latest.entries
        holders: list[Holder] = []
        for part in module.modules():
            holders += [part._buffers, vars(part)]
        entries = {}
        for holder in holders:
            for key, value in _state_in(holder):
                place = id(holder), key
                entry = known.get(place)
                if entry is None or entry.value is not value or not _same(value, entry.content):
                    entry = Entry(holder, key, value, _copied(value))
                entries[place] = entry
        return cls(holders, entries, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put everything back, in the objects where it was."""
        for holder in self.holders:
            for key, _ in _state_in(holder):
                # A forward has made it since.
                if (id(holder), key) not in self.entries:
                    del holder[key]
        for holder, key, value, content in self.entries.values():
            if holder.get(key) is not value:
                holder[key] = value
            if not _same(value, content):
                _fill(value, content)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, np.random.Generator, random.Random)
NUMBERS = (type(None), bool, int, float, complex, str, bytes, tuple)


def _state_in(holder: Holder) -> list[tuple[str, object]]:
    """Return what a forward may change: no modules, functions and objects, no graph."""
    state = []
    for key, value in holder.items():
        if isinstance(value, torch.Tensor):
            changes = _is_state(value)
        else:
            changes = isinstance(value, (*NUMBERS, *CONTAINERS, *GENERATORS, np.ndarray))
        if changes and key not in OF_PYTORCH:
            state.append((key, value))
    return state


def _is_state(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None and not isinstance(tensor, torch.nn.Parameter)


def _copied(value: object) -> Any:
    """Return a copy of what is in an object; of what is no state, the object.

    A container has each item with its copy: others may hold the item, too.
    """
    if isinstance(value, torch.Tensor):
        if _is_state(value):
            return value.detach().clone()
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: (item, _copied(item)) for key, item in value.items()}
    if isinstance(value, CONTAINERS):
        return [(item, _copied(item)) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value


def _same(value: object, content: Any) -> bool:
    """Return True if an object has what its copy has: it is written to only where it must be."""
    if isinstance(value, torch.Tensor):
        if not isinstance(content, torch.Tensor):
            return False
        alike = value.shape == content.shape and value.dtype == content.dtype
        return alike and torch.equal(value.detach(), content.detach())
    if isinstance(value, np.ndarray):
        return np.array_equal(value, content)
    if isinstance(value, dict):
        return list(value) == list(content) and _same([*value.values()], [*content.values()])
    if isinstance(value, CONTAINERS):
        if len(value) != len(content):
            return False
        return all(now is item and _same(now, copy) for now, (item, copy) in zip(value, content))
    if isinstance(value, torch.Generator):
        return torch.equal(value.get_state(), content)
    if isinstance(value, (np.random.Generator, random.Random)):
        return False
    return value is content or (isinstance(value, NUMBERS) and bool(value == content))


def _fill(value: Any, content: Any) -> None:
    """Write a copy back into the object that it was made of."""
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
    elif isinstance(value, dict):
        value.clear()
        value.update((key, _restored(*entry)) for key, entry in content.items())
    else:
        value.clear()
        if isinstance(value, set):
            add = value.update
        else:
            add = value.extend
        add(_restored(*entry) for entry in content)


def _restored(item: object, copy: object) -> Any:
    """Return an item of a container with the content that it had."""
    if not _same(item, copy):
        _fill(item, copy)
    return item
