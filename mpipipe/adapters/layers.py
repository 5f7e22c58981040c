"""What may stand in a list of layers: layers, PyTorch modules, functions of JAX, and functions that make them."""

from __future__ import annotations

import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Branches, Shape, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import random_key

EXPECTED = (
    "an nn.Layer, a torch.nn.Module, a pair (function of JAX, its parameters), or a function without arguments that "
    "makes one of them"
)


def as_layer(given: Any, place: int, seed: int = 0) -> nn.Layer:
    """Return the layer that an entry of a list of layers is, or that it makes.

    A module of PyTorch that a function makes draws its values for (seed, place), so they do not depend on the ranks.

    Parameters
    ----------
    given : Layer, torch.nn.Module, (callable, tree of arrays), or callable
        The entry: see `EXPECTED`. The parameters of a module or of a function of JAX lie in the buffers of the stage
        that binds the layer, in its dtype, and have their own names, such as 3.conv.weight.
    place, seed : int
        Place in the list, and seed of the model.

    Returns
    -------
    Layer
        The layer, unbound.

    Raises
    ------
    ArgumentError
        It is something else.
    """
    entry, given = given, given.entry if isinstance(given, WithSkips) else given
    if not isinstance(given, (nn.Layer, tuple)) and not is_module(given) and callable(given):
        with seeded(seed, place):
            given = given()
    if isinstance(given, nn.Layer):
        names = {*nn.names_within([given])}
        if {*names_of_entry(entry)} != names:
            raise ArgumentError(
                f"layers[{place}] is made by a function, and takes or gives names, which each rank must know",
                found=f"{type(given).__name__} with {', '.join(sorted(name for name, _ in names)) or 'no names'}",
                expected="the layer itself in the list, which holds no arrays before a stage binds it",
                remedy="or mpipipe.adapters.with_skips(function, takes=(...), gives=(...)) with its names",
            )
        return given
    is_pair = isinstance(given, tuple) and len(given) == 2 and callable(given[0])
    if is_pair or is_module(given):
        library = "jax" if is_pair else "pytorch"
        return (
            NamedForeignLayer(library, given, entry) if isinstance(entry, WithSkips) else ForeignLayer(library, given)
        )
    raise ArgumentError(f"layers[{place}] is not a layer", found=type(given).__name__, expected=EXPECTED)


@dataclass(frozen=True)
class WithSkips:
    """See `mpipipe.adapters.with_skips`, which makes it."""

    entry: Any
    gives: tuple[str, ...]
    takes: tuple[str, ...]


def names_of_entry(given: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names that an entry of a list of layers has to do with, and whether it gives them; makes nothing."""
    if isinstance(given, WithSkips):
        yield from ((name, False) for name in given.takes)
        yield from ((name, True) for name in given.gives)
    elif isinstance(given, nn.Layer):
        yield from nn.names_within([given])


def is_module(given: Any) -> bool:
    """Whether this is a module of PyTorch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def _zeros(_generator: np.random.Generator, shape: Shape) -> np.ndarray:
    return np.zeros(shape)


DRAWING = threading.Lock()  # ranks that are threads share the generator of PyTorch


@contextmanager
def seeded(seed: int, place: int, waits: bool = False) -> Iterator[None]:
    """Let PyTorch, where it is there, draw for (seed, place) within, and go on after it as before.

    `waits` says whether the block may wait for other ranks, which must be able to draw meanwhile.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with nullcontext() if waits else DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(random_key("layers", seed, place)[0]) >> 1)
        yield


class ForeignLayer(nn.Layer):
    """A module of PyTorch or a function of JAX as a layer; `inner` is the stage of it, once the layer is bound.

    Its input and output may be a tuple or dict of arrays, where its neighbours take them.
    """

    freezes_parts = True

    def __init__(self, library: str, given: Any) -> None:
        self._room: Any = import_module(f"mpipipe.adapters.{library}.stage")
        self.given = given
        self.declared = self._room.declared_by(given)

    def forget(self) -> ForeignLayer:
        """Let go of the module and its arrays: what is left says what the layer is."""
        self.given = None
        self.declared = {key: replace(entry, draw=_zeros) for key, entry in self.declared.items()}
        return self

    def bound(self) -> None:
        if self.stage.compute is not self.stage.parameters:
            raise ArgumentError(
                f"layer {self.name} is of PyTorch or JAX, and its stage computes in half precision",
                expected="dtype float32 or float64",
                remedy="torch.autocast, or a cast in JAX, within the layer",
            )
        gradients = {key: getattr(self, f"{key}_grad") for key in self.declared}
        values = {key: getattr(self, key) for key in self.declared}
        self.inner = self._room.stage_on(self.given, values, gradients, self.stage.seed)
        self.inner.index, self.inner.poll = int(self.name), self._poll

    def _poll(self) -> None:
        if self.stage.poll is not None:
            self.stage.poll()

    def forward(self, x: Array) -> tuple[Array, Any]:
        self.inner.refresh()
        found: tuple[Array, Any]
        if tracemalloc.is_tracing() or getattr(COUNTED, "on", False):
            found, held = self._room.counted(self.inner, x, self.stage.position)
            return shown_to_tracer(found[0], held), Traced(found[1], np.empty(sum(held.values()), np.uint8))
        found = self.inner.forward(x, self.stage.position)
        return found

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, pending = self.inner.backward_input(dy, saved[0] if isinstance(saved, Traced) else saved)
        if isinstance(saved, Traced):
            return shown_to_tracer(dx, {}), Traced(pending, saved.room)
        return dx, pending

    def backward_weight(self, pending: Any) -> None:
        self.inner.backward_weight(pending[0] if isinstance(pending, Traced) else pending)

    def backward(self, dy: Array, saved: Any) -> Any:
        return self.inner.backward(dy, saved[0] if isinstance(saved, Traced) else saved)


class NamedForeignLayer(ForeignLayer):
    """One that is called with values which stand under names, and returns others."""

    def __init__(self, library: str, given: Any, entry: WithSkips) -> None:
        super().__init__(library, given)
        self.gives, self.takes = entry.gives, entry.takes

    def bound(self) -> None:
        super().bound()
        self.inner.gives, self.inner.takes = self.gives, self.takes

    def forward(self, x: Array) -> tuple[Array, Any]:
        taken = {name: self.stage.taken(name) for name in self.takes}
        y, saved = super().forward(Branches(x, **taken) if taken else x)
        if not isinstance(y, Branches):
            return y, (saved, {})
        for name, tree in y.skips.items():
            self.stage.give(name, tree)
        return y.main, (saved, y.skips)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, pending = super().backward_input(self._joined(dy, saved[1]), saved[0])
        return self._parted(dx), pending

    def backward(self, dy: Array, saved: Any) -> Any:
        return self._parted(super().backward(self._joined(dy, saved[1]), saved[0]))

    def _joined(self, dy: Tree, given: dict[str, Tree]) -> Tree:
        """Return the gradient of the output with those of what was given, which are zeros where nobody has added."""
        found = {name: nn.or_zeros(self.stage.gradient_of(name), tree) for name, tree in given.items()}
        return Branches(dy, **found) if found else dy

    def _parted(self, dx: Tree) -> Tree:
        if not isinstance(dx, Branches):
            return dx
        for name, gradient in dx.skips.items():
            self.stage.add_gradient(name, gradient)
        return dx.main


# -- Memory of PyTorch and JAX, for whoever asks Python's allocator: arrays as large that nobody writes to ------------


COUNTED = threading.local()  # `on`: layers show what PyTorch and JAX keep, to whoever looks at what a forward saved


@contextmanager
def counting() -> Iterator[None]:
    """Let forwards of this thread save arrays as large as what PyTorch and JAX keep."""
    COUNTED.on = True
    try:
        yield
    finally:
        COUNTED.on = False


class Traced(NamedTuple):
    """What a layer saved, and an array as large as what PyTorch or JAX keep for it."""

    saved: Any
    room: np.ndarray


def shown_to_tracer(tree: Any, held: Mapping[int, int]) -> Any:
    """Return arrays, each with one as large that is there as long; but for those whose memory `held` counts."""
    for leaf in arrays.flatten(tree)[0]:
        if leaf is not None and arrays.address(leaf) not in held:
            weakref.finalize(leaf, len, np.empty(leaf.nbytes, np.uint8))
    return tree
