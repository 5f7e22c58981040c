"""Entries of a list of layers: layers, PyTorch modules, functions of JAX, and what makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from mpipipe import nn
from mpipipe.adapters.foreign import WithSkips, seeded
from mpipipe.errors import ArgumentError


def as_layer(entry: object, place: int, seed: int = 0) -> nn.Layer:
    """Return the layer, unbound, that an entry of a list of layers is or makes.

    A module of PyTorch that a function makes draws its values for (seed, place), so they do not
    depend on the ranks. A loss of PyTorch with parameters is a layer that has them, and leaves its
    input as it is. The parameters of a module or of a function of JAX lie in the buffers of the
    stage that binds the layer, in its dtype, and have their own names, such as 3.conv.weight.

    Raises ArgumentError for anything else.
    """
    skips = skips_of(entry)
    thing = skips.entry
    is_made = isinstance(thing, (nn.Layer, tuple)) or is_module(thing) or _is_loss(thing)
    if callable(thing) and not is_made:
        with seeded(seed, place):
            thing = thing()
    if isinstance(thing, nn.Layer):
        names = {*nn.names_within(thing)}
        if {*names_of_entry(entry)} != names or skips.ties:
            raise ArgumentError(
                f"layers[{place}] is made by a function, and takes or gives names, which each "
                "rank must know",
                found=f"{type(thing).__name__} with "
                f"{', '.join(sorted(name for name, _ in names)) or 'no names'}",
                expected="the layer itself in the list, which holds no arrays before a stage "
                "binds it",
                remedy="or mpipipe.adapters.with_skips(function, takes=(...), gives=(...)) with "
                "its names; ties of a "
                "layer of nn are those of its parameters",
            )
        return thing
    skips = replace(skips, entry=thing)
    layer: nn.Layer
    if _is_loss(thing):
        layer = import_module("mpipipe.adapters.pytorch.layer").LossLayer(thing, place)
    elif is_module(thing):
        layer = import_module("mpipipe.adapters.pytorch.layer").TorchLayer(skips, place)
    elif isinstance(thing, tuple) and len(thing) in (2, 3) and callable(thing[0]):
        layer = import_module("mpipipe.adapters.jax.layer").JaxLayer(skips, place)
    else:
        raise ArgumentError(
            f"layers[{place}] is not a layer",
            found=type(thing).__name__,
            expected="an nn.Layer, a torch.nn.Module, a tuple (function of JAX, its parameters), "
            "perhaps with its "
            "state, or a function without arguments that makes one of them",
        )
    return layer


def skips_of(entry: object) -> WithSkips:
    """Return an entry with its names, or with none."""
    if isinstance(entry, WithSkips):
        return entry
    return WithSkips(entry)


def names_of_entry(entry: object) -> Iterator[tuple[str, bool]]:
    """Yield the names that an entry takes, with False, and those that it gives, with True."""
    if isinstance(entry, WithSkips):
        yield from ((name, False) for name in entry.takes)
        yield from ((name, True) for name in entry.gives)
    elif isinstance(entry, nn.Layer):
        yield from nn.names_within(entry)


def check_distinct(layers: Sequence[object]) -> None:
    """Raise ArgumentError for one layer or module in two places: a cut would untie them."""
    names: dict[int, str] = {}
    for place, entry in enumerate(layers):
        thing = skips_of(entry).entry
        walked: Iterable[tuple[str, Any]] = ()
        if isinstance(thing, nn.Layer):
            walked = thing.walk(f"{place}")
        elif is_module(thing):
            walked = [(f"{place}", thing)]
        for name, part in walked:
            first = names.setdefault(id(part), name)
            if first != name:
                raise ArgumentError(
                    f"one {type(part).__name__} is layer {first} and layer {name}",
                    expected="a layer object of its own in each place",
                    remedy="make a second one, and let it share parameters: second.weight = "
                    "first.weight in PyTorch, "
                    "nn.Parameter(tie=...) here",
                )


def tie_shared(layers: Sequence[object]) -> None:
    """Tie parameters that modules of several entries share, by the name of their first place."""
    modules: dict[int, Any] = {}
    names: dict[int, str] = {}
    for place, entry in enumerate(layers):
        skips = skips_of(entry)
        thing = skips.entry
        if _is_loss(thing):
            thing = thing.module
        if isinstance(thing, tuple) and not skips.ties:
            _refuse_shared(place, thing[1:2], names)
        elif is_module(thing):
            modules[place] = thing
    if len(modules) > 1:
        import_module("mpipipe.adapters.pytorch.ties").tie_shared(modules)


def _refuse_shared(place: int, parameters: object, names: dict[int, str]) -> None:
    """Raise ArgumentError for an array in two functions of JAX: it might mean one parameter."""
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(parameters)[0]:
        name = f"{place}.{jax.tree_util.keystr(path[1:], simple=True, separator='.')}"
        other = names.setdefault(id(leaf), name)
        if other.partition(".")[0] != f"{place}" and np.ndim(leaf):
            raise ArgumentError(
                f"one array is the parameter {other} and the parameter {name}",
                expected="an array of its own for each, or ties",
                remedy="with_skips(entry, ties={name: key}) in both entries for one parameter, "
                "jnp.array(x) for two",
            )


def is_module(thing: object) -> bool:
    """True for a module of PyTorch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.nn.Module)


def _is_loss(thing: object) -> bool:
    room = sys.modules.get("mpipipe.adapters.pytorch.loss")
    return room is not None and isinstance(thing, room.TorchLoss)


def with_loss(layers: Sequence[object], loss: Any, seed: int) -> list[Any]:
    """Add a loss of PyTorch with parameters to train as the last entry of a list of layers.

    The loss draws its random numbers for the seed.
    """
    entries = [*layers]
    if _is_loss(loss):
        loss.seed = seed
        if loss.parameters and not any(entry is loss for entry in layers):
            entries.append(loss)
    return entries
