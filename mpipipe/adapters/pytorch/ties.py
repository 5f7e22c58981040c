"""Parameters that several entries of a list of layers share, as an embedding and a head do."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from mpipipe.errors import ArgumentError

# Attribute of a parameter: the key of what it shares.
TIE = "mpipipe_tie"
# Attribute of a buffer that modules of several places have.
SHARED = "mpipipe_shared"


def tie_shared(modules: Mapping[int, torch.nn.Module]) -> None:
    """Mark parameters that modules of several places share, and give each later place its own.

    The key is the name of the first place, so all ranks find the same one. The pipeline keeps tied
    parameters equal.
    """
    names: dict[int, str] = {}
    buffers: dict[int, int] = {}
    for place, module in modules.items():
        _divide(module, f"{place}", names)
        for buffer in module.buffers():
            if buffers.setdefault(id(buffer), place) != place:
                setattr(buffer, SHARED, True)
        for name, thing in (*module.named_parameters(), *module.named_modules()):
            names.setdefault(id(thing), f"{place}.{name}".rstrip("."))


def _divide(module: torch.nn.Module, name: str, names: dict[int, str]) -> None:
    """Put twins in the places of parameters, and of modules, that have a name already, by id."""
    for key, parameter in module._parameters.items():
        if id(parameter) in names:
            module._parameters[key] = _twin(parameter, names)
    for key, part in module._modules.items():
        if part is None:
            continue
        if id(part) not in names or not [*part.parameters()]:
            _divide(part, f"{name}.{key}", names)
            continue
        if [*part.buffers()]:
            raise ArgumentError(
                f"one {type(part).__name__} with buffers is in two layers, {names[id(part)]} and "
                f"{name}.{key}",
                expected="a module of its own in each layer: statistics of one would not be those "
                "of the other",
                remedy="make a second one, and let it share parameters: second.weight = "
                "first.weight",
            )
        twins = {id(parameter): _twin(parameter, names) for parameter in part.parameters()}
        module._modules[key] = copy.deepcopy(part, twins)


def _twin(parameter: torch.nn.Parameter, names: dict[int, str]) -> torch.nn.Parameter:
    twin = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    # A twin may have twins of its own: all have the key of the first place.
    setattr(twin, TIE, parameter.__dict__.setdefault(TIE, names[id(parameter)]))
    return twin
