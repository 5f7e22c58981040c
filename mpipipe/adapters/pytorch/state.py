"""What the forward of a module changes besides its output: buffers, attributes, generators, and the
mode of its parts.

Statistics (batch normalisation, running means, counters) follow the forwards in the order of their
micro-batches, as in a loop of PyTorch. A forward that is run again for its backward must find the
state of the first time, and leave the state of now:

    forward 0   forward 1   forward 2   forward 0 again   backward 0
    s0 -> s1    s1 -> s2    s2 -> s3    s0, then s3
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mpipipe.adapters.foreign import drawing_turn
from mpipipe.nn import Position

Tensor: TypeAlias = Any  # torch.Tensor: PyTorch may be missing where types are checked
Run: TypeAlias = "tuple[int, int, int]"  # step, micro-batch and replica of a forward

OF_PYTORCH = frozenset(vars(torch.nn.Module()))  # attributes that every module has


class ModuleState:
    """The state of a module, and what it was before those forwards that will be run again."""

    def __init__(self, module: Any):
        self._module = module
        self._before: dict[Run, ModuleSnapshot] = {}

    @contextmanager
    def drawing(self, gpu: int | None, seed: int, position: Position) -> Iterator[None]:
        """Within, a forward of this position draws its random numbers, whatever else is drawn
        before or meanwhile.

        It finds the state that belongs to it, and its parts have the right mode.
        """
        generator = torch.default_generator if gpu is None else torch.cuda.default_generators[gpu]
        with drawing_turn():
            before = generator.get_state()
            generator.manual_seed(seed)
            try:
                with self._at(position):
                    yield
            finally:
                generator.set_state(before)

    def _at(self, position: Position) -> AbstractContextManager[None]:
        if not position.training:
            return _evaluating(self._module)
        if position.recompute == "now":
            return self._put_back(position)
        if position.recompute == "later":
            self._note(position)
        return nullcontext()

    def _note(self, position: Position) -> None:
        run = position.step, position.microbatch, position.replica
        if any(
            step != position.step for step, _, _ in self._before
        ):  # left by a step that has failed
            self._before = {}
        latest = next(reversed(self._before.values()), None)
        self._before[run] = ModuleSnapshot.of(self._module, latest)

    @contextmanager
    def _put_back(self, position: Position) -> Iterator[None]:
        before = self._before.pop((position.step, position.microbatch, position.replica), None)
        if before is None:
            yield
            return
        now = ModuleSnapshot.of(self._module, before)
        before.restore()
        try:
            yield
        finally:
            now.restore()


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Within, no part is in training; after it each is as its owner had set it."""
    trained = [part for part in module.modules() if part.training]
    for part in trained:
        part.training = False
    try:
        yield
    finally:
        for part in trained:
            part.training = True


# -- A copy of the state ---------------------------------------------------------------------------


class Entry(NamedTuple):
    """What stands under a key of the buffers or attributes of a module: the object, and a copy of
    what is in it.
    """

    holder: MutableMapping[str, Any]
    key: str
    value: Any
    content: Any


class ModuleSnapshot(NamedTuple):
    """The state of a module at one time, and of the generators that random numbers of a forward may
    come from.
    """

    holders: list[MutableMapping[str, Any]]
    entries: list[Entry]
    python: Any
    numpy: Any

    @classmethod
    def of(cls, module: Any, latest: ModuleSnapshot | None) -> ModuleSnapshot:
        """Return the state as it is now; what has not changed since the latest one shares its
        memory.
        """
        known = (
            {} if latest is None else {(id(each.holder), each.key): each for each in latest.entries}
        )
        holders = [holder for part in module.modules() for holder in (part._buffers, vars(part))]
        entries = []
        for holder in holders:
            for key, value in _state_in(holder):
                same = known.get((id(holder), key))
                if same is None or same.value is not value or not _equal(value, same.content):
                    same = Entry(holder, key, value, _copied(value))
                entries.append(same)
        return cls(holders, entries, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put everything back, in the objects where it was."""
        known = {(id(each.holder), each.key) for each in self.entries}
        for holder in self.holders:
            for key, _ in _state_in(holder):
                if (id(holder), key) not in known:  # a forward has made it since
                    del holder[key]
        for holder, key, value, content in self.entries:
            if holder.get(key) is not value:
                holder[key] = value
            if not _equal(value, content):
                _fill(value, content)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


CONTAINERS = (list, dict, set, deque)
NUMBERS = (type(None), bool, int, float, complex, str, bytes, tuple)


def _state_in(holder: MutableMapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (key, value) for key, value in holder.items() if key not in OF_PYTORCH and _is_state(value)
    ]


def _is_state(value: Any) -> bool:
    """Whether a forward may change this: not modules, functions and objects, nor what belongs to
    one graph.
    """
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and not isinstance(value, torch.nn.Parameter)
    return isinstance(
        value,
        (*NUMBERS, *CONTAINERS, np.ndarray, torch.Generator, np.random.Generator, random.Random),
    )


def _copied(value: Any) -> Any:
    """Return a copy of what is in an object; of what is no state, the object."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if _is_state(value) else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        return [_copied(each) for each in value]
    if isinstance(value, set):
        return set(value)
    return _generator_state(value)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value


def _equal(value: Any, content: Any) -> bool:
    """Whether an object has what a copy of it has."""
    if isinstance(value, torch.Tensor):
        if not isinstance(content, torch.Tensor) or (value.shape, value.dtype) != (
            content.shape,
            content.dtype,
        ):
            return False
        return value is content or torch.equal(value.detach(), content.detach())
    if isinstance(value, np.ndarray):
        return value.shape == content.shape and bool(np.array_equal(value, content))
    if isinstance(value, dict):
        return value.keys() == content.keys() and all(
            _equal(value[key], content[key]) for key in value
        )
    if isinstance(value, (list, deque)):
        return len(value) == len(content) and all(map(_equal, value, content))
    if isinstance(value, torch.Generator):
        return torch.equal(value.get_state(), content)
    if isinstance(value, (np.random.Generator, random.Random)):
        return False
    return value is content or bool(
        type(value) is type(content) and isinstance(value, NUMBERS) and value == content
    )


def _fill(value: Any, content: Any) -> None:
    """Write a copy back into the object that it was made of."""
    if isinstance(value, torch.Tensor):
        value.data.copy_(
            content
        )  # not counted as a write in place: graphs hold these tensors, and do not read them
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(_copied(content))
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(_copied(content))
