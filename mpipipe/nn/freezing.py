"""Which parameters are frozen, and the buffers in which they lie: apart, so that `flat` is what is trained.

parameters   | trained ...        |   held   | frozen ... |
gradients    | of the trained ... |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.parameters import FlatBuffer, Parameter, drawn, memory_order


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether the last pattern that fits a name freezes it: a pattern that begins with ! keeps it trained."""
    for pattern in reversed(patterns):
        if fnmatchcase(name, pattern.removeprefix("!")):
            return not pattern.startswith("!")
    return False


def frozen_names(declared: Mapping[str, Parameter], patterns: Sequence[str]) -> set[str]:
    """Return the names of frozen parameters; raise ArgumentError if only some places of a tied one are frozen."""
    frozen = {name for name, parameter in declared.items() if parameter.frozen or is_frozen(name, patterns)}
    places: dict[str, list[str]] = {}
    for name, parameter in declared.items():
        if parameter.tie is not None:
            places.setdefault(parameter.tie, []).append(name)
    for key, names in places.items():
        if 0 < len(frozen.intersection(names)) < len(names):
            raise partly_frozen_error(key, [name for name in names if name not in frozen])
    return frozen


def partly_frozen_error(key: str, trained: Collection[str]) -> ArgumentError:
    """Make the error for a tied parameter of which only some places are frozen."""
    return ArgumentError(
        f"the tied parameter {key!r} is frozen in some of its places only",
        found=f"{', '.join(trained)} is trained",
        expected="all places frozen, or none: they are one parameter",
        remedy="freeze both: a pattern for each place, or none for either",
    )


class Buffers(NamedTuple):
    """The arrays of a stage.

    Attributes
    ----------
    parameters, compute : all of them; `flat` has those that are trained
    gradients : of those that are trained
    held, held_compute : the frozen ones
    """

    parameters: FlatBuffer
    gradients: FlatBuffer
    compute: FlatBuffer
    held: FlatBuffer
    held_compute: FlatBuffer


def make_buffers(
    declared: Mapping[str, Parameter], frozen: Collection[str], dtype: np.dtype, device: str, seed: int
) -> Buffers:
    """Make the buffers of a stage that computes in `dtype`, with initial values."""
    wide = arrays.accumulator(dtype)
    trained = {name: parameter for name, parameter in declared.items() if name not in frozen}
    rest = {name: parameter for name, parameter in declared.items() if name in frozen}
    shapes, held_shapes = ({name: p.shape for name, p in some.items()} for some in (trained, rest))
    layout: Any = {"narrowest": dtype, "order": memory_order(trained)}
    parameters = drawn(trained, wide, device, seed, layout)
    gradients = FlatBuffer(shapes, wide, device, **layout)
    held = drawn(rest, wide, device, seed, {"narrowest": dtype})
    compute, held_compute = parameters, held
    if wide != dtype:
        compute = FlatBuffer(shapes, dtype, device, **layout)
        held_compute = FlatBuffer(held_shapes, dtype, device)
        compute.adopt(held_compute, declared)
    parameters.adopt(held, declared)
    return Buffers(parameters, gradients, compute, held, held_compute)


def mark_frozen(named: Sequence[tuple[str, Layer]]) -> None:
    """Tell each layer whether all parameters in it are frozen; called when all of them are bound.

    Raises ArgumentError for a layer that has frozen and trained parameters, and does not say that it can.
    """
    for name, layer in named:
        found = [getattr(each, f"{key}_grad") is None for _, each in layer.walk("") for key in each.declared]
        layer.frozen = bool(found) and all(found)
        own = {getattr(layer, f"{key}_grad") is None for key in layer.declared}
        if len(own) == 2 and not vars(type(layer)).get("freezes_parts", False):
            raise ArgumentError(
                f"layer {name} ({type(layer).__name__}) cannot train a part of its parameters",
                found=", ".join(f"{key} frozen" for key in layer.declared if getattr(layer, f"{key}_grad") is None),
                expected="all of them frozen, or none; or a class with freezes_parts = True, which looks whether a "
                "gradient is None",
            )
