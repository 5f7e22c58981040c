"""What may stand in a list of layers: layers, PyTorch modules, functions of JAX, and functions that make them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Branches, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import random_key


def as_layer(given: Any, place: int, seed: int = 0) -> nn.Layer:
    """Return the layer, unbound, that an entry of a list of layers is or makes; an ArgumentError for anything else.

    A module of PyTorch that a function makes draws its values for (seed, place), so they do not depend on the ranks. A
    loss of PyTorch with parameters is a layer that has them, and leaves its input as it is.
    The parameters of a module or of a function of JAX lie in the buffers of the stage that binds the layer, in its
    dtype, and have their own names, such as 3.conv.weight.
    """
    entry, given = given, given.entry if isinstance(given, WithSkips) else given
    given = loss_holder(given)
    if not isinstance(given, (nn.Layer, tuple)) and not is_module(given) and callable(given):
        with seeded(seed, place):
            given = given()
    if isinstance(given, nn.Layer):
        names = {*nn.names_within(given)}
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
        more = (entry.gives, entry.takes, entry.ties) if isinstance(entry, WithSkips) else ()
        return ForeignLayer(library, given, *more)
    raise ArgumentError(
        f"layers[{place}] is not a layer",
        found=type(given).__name__,
        expected="an nn.Layer, a torch.nn.Module, a pair (function of JAX, its parameters), or a function without "
        "arguments that makes one of them",
    )


@dataclass(frozen=True)
class WithSkips:
    """See `mpipipe.adapters.with_skips`, which makes it."""

    entry: Any
    gives: tuple[str, ...]
    takes: tuple[str, ...]
    ties: tuple[tuple[str, str], ...] = ()  # names of parameters within the entry, and the key of what is shared


def names_of_entry(given: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names that an entry of a list of layers has to do with, and whether it gives them; makes nothing."""
    if isinstance(given, WithSkips):
        yield from ((name, False) for name in given.takes)
        yield from ((name, True) for name in given.gives)
    elif isinstance(given, nn.Layer):
        yield from nn.names_within(given)


def check_distinct(layers: Sequence[Any]) -> None:
    """Raise ArgumentError where one layer, or one module of PyTorch, stands in two places: a cut would untie them."""
    seen: dict[int, str] = {}
    for place, entry in enumerate(layers):
        entry = entry.entry if isinstance(entry, WithSkips) else entry
        walked = entry.walk(f"{place}") if isinstance(entry, nn.Layer) else [(f"{place}", entry)] * is_module(entry)
        for name, each in walked:
            if seen.setdefault(id(each), name) != name:
                raise ArgumentError(
                    f"one {type(each).__name__} is layer {seen[id(each)]} and layer {name}",
                    expected="a layer object of its own in each place",
                    remedy="make a second one, and let it share parameters: second.weight = first.weight in PyTorch, "
                    "nn.Parameter(tie=...) here",
                )


def tie_shared(layers: Sequence[Any]) -> None:
    """Let parameters that modules of several entries share be tied, by the name of their first place."""
    modules = {place: _module_in(entry) for place, entry in enumerate(layers)}
    several = {place: module for place, module in modules.items() if is_module(module)}
    if len(several) > 1:
        import_module("mpipipe.adapters.pytorch.ties").tie_shared(several)


def _module_in(entry: Any) -> Any:
    return loss_holder(entry.entry if isinstance(entry, WithSkips) else entry)


def loss_holder(given: Any) -> Any:
    """Return the layer that holds the parameters of a loss of PyTorch; anything else as it is."""
    room = sys.modules.get("mpipipe.adapters.pytorch.loss")
    return room.holder_of(given) if room is not None and isinstance(given, room.TorchLoss) else given


def is_module(given: Any) -> bool:
    """Whether this is a module of PyTorch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


DRAWING = threading.Lock()  # ranks that are threads share the generator of PyTorch


TURN = threading.local()  # `lock`: of the task whose batches another thread reads ahead


def let_draw_in_turn(lock: Any) -> None:
    """Let modules of this thread draw random numbers only while they hold this lock."""
    TURN.lock = lock


def drawing_turn() -> AbstractContextManager[Any]:
    """Within, no reader of batches draws from the generators of PyTorch."""
    found: AbstractContextManager[Any] | None = getattr(TURN, "lock", None)
    return nullcontext() if found is None else found


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

    Its input and output may be a tuple or dict of arrays, where its neighbours take them. It is called with the values
    that stand under the names that it takes, and returns others for those that it gives.
    """

    freezes_parts = True
    ends = False
    takes_any = True
    inner: Any = None  # the stage of the module or function, once the layer is bound

    def __init__(
        self,
        library: str,
        given: Any,
        gives: tuple[str, ...] = (),
        takes: tuple[str, ...] = (),
        ties: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._room: Any = import_module(f"mpipipe.adapters.{library}.stage")
        self.given, self.gives, self.takes = given, gives, takes
        declared: dict[str, nn.Parameter] = self._room.declared_by(given)
        for name, key in ties:
            if name not in declared:
                found = ", ".join(declared) or "no parameters"
                raise ArgumentError(f"a tie names no parameter: {name!r}", found=found)
            declared[name] = replace(declared[name], tie=key)
        self.declared = declared
        self._tied = [name for name, entry in self.declared.items() if entry.tie is not None]

    @property
    def mixes_positions(self) -> bool:  # type: ignore[override]
        """True, unless the module or the function has an attribute of this name that is False."""
        return bool(getattr(self.given[0] if isinstance(self.given, tuple) else self.given, "mixes_positions", True))

    def forget(self) -> ForeignLayer:
        """Let go of the module and its arrays: what is left says what the layer is."""
        self.given = SimpleNamespace(mixes_positions=self.mixes_positions)
        self.declared = {
            key: replace(entry, draw=lambda _generator, shape: np.zeros(shape)) for key, entry in self.declared.items()
        }
        return self

    def bound(self) -> None:
        if self.inner is not None:  # a tied parameter shares the storage of another place
            self._follow_ties()
            return
        if self.stage.compute is not self.stage.parameters:
            raise ArgumentError(
                f"layer {self.name} is of PyTorch or JAX, and its stage computes in half precision",
                expected="dtype float32 or float64",
                remedy="torch.autocast, or a cast in JAX, within the layer",
            )
        gradients = {key: getattr(self, f"{key}_grad") for key in self.declared}
        values = {key: getattr(self, key) for key in self.declared}
        self.inner = self._room.stage_on(self.given, values, gradients, self.stage.seed)
        self.inner.gives, self.inner.takes = self.gives, self.takes
        self.inner.index, self.inner.poll = int(self.name), lambda: self.stage.poll and self.stage.poll()

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Persistent buffers of a module by their names within it: views, which a load may write to."""
        found: dict[str, np.ndarray] = getattr(self.inner, "buffers", {})
        return found

    def _follow_ties(self) -> None:
        """Compute with the arrays that a pipeline has given to tied parameters and their gradients."""
        for name in self._tied:
            self.inner.place(name, getattr(self, name), getattr(self, f"{name}_grad"))

    def begin_call(self) -> None:
        self.inner.begin()

    def forward(self, x: Any) -> tuple[Any, tuple[Held, dict[str, Tree]]]:
        self._follow_ties()
        self.inner.refresh()
        self.inner.ends, held = self.ends, {}
        if self.takes:
            x = Branches(x, **{name: self.stage.taken(name) for name in self.takes})
        if getattr(COUNTED, "on", False):
            (y, saved), held = self._room.counted(self.inner, x, self.stage.position)
            for key in self.declared:
                held.pop(arrays.address(getattr(self, key)), None)
        else:
            y, saved = self.inner.forward(x, self.stage.position)
        if not self.gives:
            return y, (Held(saved, held), {})
        for name, tree in y.skips.items():
            self.stage.give(name, tree)
        return y.main, (Held(saved, held), y.skips)

    def backward_input(self, dy: Any, saved: tuple[Held, dict[str, Tree]]) -> tuple[Any, Held]:
        self._follow_ties()
        held, given = saved
        dx, pending = self.inner.backward_input(self._joined(dy, given), held.saved)
        return self._parted(dx), Held(pending, held.bytes)

    def backward_weight(self, pending: Held) -> None:
        self._follow_ties()
        self.inner.backward_weight(pending.saved)

    def backward(self, dy: Any, saved: tuple[Held, dict[str, Tree]]) -> Any:
        self._follow_ties()
        held, given = saved
        return self._parted(self.inner.backward(self._joined(dy, given), held.saved))

    def _joined(self, dy: Tree, given: dict[str, Tree]) -> Tree:
        """Return the gradient of the output with those of what was given, zeros where no layer has added."""
        found = {name: nn.or_zeros(self.stage.gradient_of(name), tree) for name, tree in given.items()}
        return Branches(dy, **found) if found else dy

    def _parted(self, dx: Any) -> Any:
        if not self.takes:
            return dx
        for name, gradient in dx.skips.items():
            self.stage.add_gradient(name, gradient)
        return dx.main


# -- Memory of PyTorch and JAX, for whoever looks at what a forward saved ----------------------------------------------


COUNTED = threading.local()  # `on`: layers say what PyTorch and JAX keep


@contextmanager
def counting() -> Iterator[None]:
    """Let forwards of this thread say with what they save how much of it PyTorch and JAX keep."""
    COUNTED.on = True
    try:
        yield
    finally:
        COUNTED.on = False


class Held(NamedTuple):
    """What a layer saved, and the bytes that PyTorch or JAX keep for it, by their address."""

    saved: Any
    bytes: dict[int, int]
