"""Parameters that several entries of a list of layers share, as an embedding and a head do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mpipipe.errors import ArgumentError

# Attribute of a parameter: the key of what it shares.
TIE = "mpipipe_tie"
# Attribute of a buffer that modules of several places have: its name in the last of them.
SHARED = "mpipipe_shared"


def tie_shared(modules: Mapping[int, torch.nn.Module]) -> None:
    """Mark parameters that modules of several places share, and give each later place its own.

    The key is the name of the first place, so all ranks find the same one. The pipeline keeps tied
    parameters equal.
    """
    places = FirstPlaces()
    for place, module in modules.items():
        places.divide(module, f"{place}")
        for name, buffer in module.named_buffers():
            first, original = places.buffers.setdefault(id(buffer), (place, buffer))
            if first != place:
                for shared in (buffer, original):
                    setattr(shared, SHARED, f"{place}.{name}")
        for name, parameter in module.named_parameters():
            places.parameters.setdefault(id(parameter), f"{place}.{name}")
        for name, part in module.named_modules():
            places.parts.setdefault(id(part), f"{place}.{name}".rstrip("."))


@dataclass
class FirstPlaces:
    """Where parameters, modules within modules, and buffers were met first, by their id."""

    parameters: dict[int, str] = field(default_factory=dict)
    parts: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def divide(self, module: torch.nn.Module, name: str) -> None:
        """Put twins in the places of parameters, and of modules, that were met before."""
        for key, parameter in [*module._parameters.items()]:
            if parameter is not None and id(parameter) in self.parameters:
                module._parameters[key] = self._twin(parameter)
        for key, part in [*module._modules.items()]:
            if part is None:
                continue
            if id(part) not in self.parts or not [*part.parameters()]:
                self.divide(part, f"{name}.{key}")
                continue
            if [*part.buffers()]:
                raise ArgumentError(
                    f"one {type(part).__name__} with buffers is in two layers, "
                    f"{self.parts[id(part)]} and {name}.{key}",
                    expected="a module of its own in each layer: statistics of one would not be "
                    "those of the other",
                    remedy="make a second one, and let it share parameters: second.weight = "
                    "first.weight",
                )
            twins = {}
            for parameter in part.parameters():
                twins[id(parameter)] = self._twin(parameter)
            module._modules[key] = copy.deepcopy(part, twins)

    def _twin(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        # A twin may have twins of its own: all have the key of the first place.
        tie = parameter.__dict__.get(TIE, self.parameters[id(parameter)])
        twin = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        for tied in (parameter, twin):
            tied.__dict__.setdefault(TIE, tie)
        return twin
