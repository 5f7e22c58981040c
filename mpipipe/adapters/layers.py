"""What may stand in a list of layers: layers, PyTorch modules, functions of JAX, and functions that
make them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from mpipipe import nn
from mpipipe.adapters.foreign import seeded
from mpipipe.errors import ArgumentError


def as_layer(given: Any, place: int, seed: int = 0) -> nn.Layer:
    """Return the layer, unbound, that an entry of a list of layers is or makes; an ArgumentError
    for anything else.

    A module of PyTorch that a function makes draws its values for (seed, place), so they do not
    depend on the ranks. A loss of PyTorch with parameters is a layer that has them, and leaves its
    input as it is. The parameters of a module or of a function of JAX lie in the buffers of the
    stage that binds the layer, in its dtype, and have their own names, such as 3.conv.weight.
    """
    entry = given if isinstance(given, WithSkips) else WithSkips(given)
    made = entry.entry
    is_entry = isinstance(made, (nn.Layer, tuple)) or is_module(made) or _is_loss(made)
    if not is_entry and callable(made):
        with seeded(seed, place):
            made = made()
    if isinstance(made, nn.Layer):
        names = {*nn.names_within(made)}
        if {*names_of_entry(given)} != names or entry.ties:
            raise ArgumentError(
                f"layers[{place}] is made by a function, and takes or gives names, which each "
                "rank must know",
                found=f"{type(made).__name__} with "
                f"{', '.join(sorted(name for name, _ in names)) or 'no names'}",
                expected="the layer itself in the list, which holds no arrays before a stage "
                "binds it",
                remedy="or mpipipe.adapters.with_skips(function, takes=(...), gives=(...)) with "
                "its names; ties of a "
                "layer of nn are those of its parameters",
            )
        return made
    options = entry.gives, entry.takes, entry.ties, place
    layer: nn.Layer
    if _is_loss(made):
        layer = import_module("mpipipe.adapters.pytorch.layer").LossLayer(made, place=place)
    elif is_module(made):
        layer = import_module("mpipipe.adapters.pytorch.layer").TorchLayer(made, *options)
    elif isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        layer = import_module("mpipipe.adapters.jax.layer").JaxLayer(made, *options)
    else:
        raise ArgumentError(
            f"layers[{place}] is not a layer",
            found=type(made).__name__,
            expected="an nn.Layer, a torch.nn.Module, a tuple (function of JAX, its parameters), "
            "perhaps with its "
            "state, or a function without arguments that makes one of them",
        )
    return layer


@dataclass(frozen=True)
class WithSkips:
    """See `mpipipe.adapters.with_skips`, which makes it."""

    entry: Any
    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)  # by names of parameters within the entry


def names_of_entry(given: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names that an entry of a list of layers has to do with, and whether it gives them;
    makes nothing.
    """
    if isinstance(given, WithSkips):
        yield from ((name, False) for name in given.takes)
        yield from ((name, True) for name in given.gives)
    elif isinstance(given, nn.Layer):
        yield from nn.names_within(given)


def check_distinct(layers: Sequence[Any]) -> None:
    """Raise ArgumentError where one layer, or one module of PyTorch, stands in two places: a cut
    would untie them.
    """
    seen: dict[int, str] = {}
    for place, entry in enumerate(layers):
        entry = entry.entry if isinstance(entry, WithSkips) else entry
        walked = (
            entry.walk(f"{place}")
            if isinstance(entry, nn.Layer)
            else [(f"{place}", entry)] * is_module(entry)
        )
        for name, each in walked:
            if seen.setdefault(id(each), name) != name:
                raise ArgumentError(
                    f"one {type(each).__name__} is layer {seen[id(each)]} and layer {name}",
                    expected="a layer object of its own in each place",
                    remedy="make a second one, and let it share parameters: second.weight = "
                    "first.weight in PyTorch, "
                    "nn.Parameter(tie=...) here",
                )


def tie_shared(layers: Sequence[Any]) -> None:
    """Let parameters that modules of several entries share be tied, by the name of their first
    place.
    """
    modules: dict[int, Any] = {}
    leaves: dict[int, str] = {}  # id -> place
    for place, entry in enumerate(layers):
        ties = entry.ties if isinstance(entry, WithSkips) else {}
        entry = entry.entry if isinstance(entry, WithSkips) else entry
        if isinstance(entry, tuple) and not ties:
            _refuse_shared(place, entry[1:2], leaves)
        module = entry.module if _is_loss(entry) else entry
        if is_module(module):
            modules[place] = module
    if len(modules) > 1:
        import_module("mpipipe.adapters.pytorch.ties").tie_shared(modules)


def _refuse_shared(place: int, parameters: Any, seen: dict[int, str]) -> None:
    """Raise ArgumentError for an array in the parameters of two functions of JAX: these might mean
    one parameter.
    """
    jax: Any = sys.modules.get("jax")
    for path, leaf in [] if jax is None else jax.tree_util.tree_flatten_with_path(parameters)[0]:
        name = f"{place}.{jax.tree_util.keystr(path[1:], simple=True, separator='.')}"
        other = seen.setdefault(id(leaf), name)
        if other.partition(".")[0] != f"{place}" and np.ndim(leaf):
            raise ArgumentError(
                f"one array is the parameter {other} and the parameter {name}",
                expected="an array of its own for each, or ties",
                remedy="with_skips(entry, ties={name: key}) in both entries for one parameter, "
                "jnp.array(x) for two",
            )


def is_module(given: Any) -> bool:
    """Whether this is a module of PyTorch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def _is_loss(given: Any) -> bool:
    room = sys.modules.get("mpipipe.adapters.pytorch.loss")
    return room is not None and isinstance(given, room.TorchLoss)


def with_loss(layers: Sequence[Any], loss: Any, seed: int) -> list[Any]:
    """Return a list of layers with a loss of PyTorch as its last entry, where the loss has
    parameters to train.

    The loss draws its random numbers for the seed.
    """
    if not _is_loss(loss):
        return [*layers]
    loss.seed = seed
    has_own = bool(loss.parameters) and not any(entry is loss for entry in layers)
    return [*layers, loss] if has_own else [*layers]
