"""Entries of a list of layers: layers, PyTorch modules, functions of JAX, and what makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

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
    if callable(thing) and not _kind(thing):
        with seeded(seed, place):
            thing = thing()
    skips = replace(skips, entry=thing)
    kind = _kind(thing)
    if kind == "layer":
        names = {*nn.names_within(thing)}
        if thing is not entry and ({*skips.names} != names or skips.ties):
            raise ArgumentError(
                f"layers[{place}] is made by a function, and takes or gives names, which each "
                "rank must know",
                found=f"{type(thing).__name__} with "
                f"{', '.join(sorted(name for name, _ in names)) or 'no names'}",
                expected="the layer itself in the list, which holds no arrays before a stage "
                "binds it",
                remedy="or mpipipe.adapters.with_skips(function, takes=(...), gives=(...)) with "
                "its names; ties of a layer of nn are those of its parameters",
            )
        return thing
    if kind == "loss":
        return import_module("mpipipe.adapters.pytorch.layer").LossLayer(thing, place)
    if kind == "module":
        return import_module("mpipipe.adapters.pytorch.layer").TorchLayer(skips, place)
    if kind == "function":
        return import_module("mpipipe.adapters.jax.layer").JaxLayer(skips, place)
    raise ArgumentError(
        f"layers[{place}] is not a layer",
        found=type(thing).__name__,
        expected="an nn.Layer, a torch.nn.Module, a tuple (function of JAX, its parameters), "
        "perhaps with its state, or a function without arguments that makes one of them",
    )


def skips_of(entry: object) -> WithSkips:
    """Return an entry with its names, or with none."""
    if isinstance(entry, WithSkips):
        return entry
    return WithSkips(entry)


def check_entries(layers: Sequence[object]) -> Iterator[tuple[int, str, bool]]:
    """Yield (place, name, whether it is given) for the names that entries take and give.

    Parameters that modules of several entries share are tied, by the name of their first place.

    Raises ArgumentError for one layer or module in two places, which a cut would untie, and for an
    array in two functions of JAX.
    """
    objects: dict[int, str] = {}
    leaves: dict[int, str] = {}
    modules: dict[int, Any] = {}
    for place, entry in enumerate(layers):
        skips = skips_of(entry)
        thing = skips.entry
        kind = _kind(thing)
        meetings: Iterable[tuple[str, bool]] = skips.names
        parts: Iterable[tuple[str, object]] = ()
        if kind == "layer":
            parts = thing.walk(f"{place}")
            if thing is entry:
                meetings = nn.names_within(skips.entry)
        elif kind == "module":
            parts = [(f"{place}", thing)]
            modules[place] = thing
        elif kind == "loss":
            modules[place] = thing.module
        elif kind == "function" and "jax" in sys.modules and not skips.ties:
            import_module("mpipipe.adapters.jax.layer").check_new_arrays(leaves, place, thing[1])
        for name, part in parts:
            first = objects.setdefault(id(part), name)
            if first != name:
                raise ArgumentError(
                    f"one {type(part).__name__} is layer {first} and layer {name}",
                    expected="a layer object of its own in each place",
                    remedy="make a second one, and let it share parameters: second.weight = "
                    "first.weight in PyTorch, nn.Parameter(tie=...) here",
                )
        for name, gives in meetings:
            yield place, name, gives
    if len(modules) > 1:
        import_module("mpipipe.adapters.pytorch.ties").tie_shared(modules)


def _kind(thing: object) -> str:
    """Return "layer", "loss", "module", "function" of JAX, or "" for anything else.

    PyTorch is not imported for the question.
    """
    if isinstance(thing, nn.Layer):
        return "layer"
    if isinstance(thing, tuple) and len(thing) in (2, 3) and callable(thing[0]):
        return "function"
    # Where a library is not imported, there are no classes of it.
    if isinstance(thing, getattr(sys.modules.get("torch.nn"), "Module", ())):
        return "module"
    if isinstance(
        thing, getattr(sys.modules.get("mpipipe.adapters.pytorch.loss"), "TorchLoss", ())
    ):
        return "loss"
    return ""


def with_loss(layers: Sequence[object], loss: Any, seed: int) -> list[Any]:
    """Add a loss of PyTorch with parameters to train as the last entry of a list of layers.

    The loss draws its random numbers for the seed.
    """
    entries = [*layers]
    if _kind(loss) == "loss":
        loss.seed = seed
        if loss.parameters and loss not in layers:
            entries.append(loss)
    return entries
