"""Parameters that modules in several entries of a list of layers share, as an embedding and a head
do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from mpipipe.errors import ArgumentError

TIE = "mpipipe_tie"  # attribute of a parameter: the key of what it shares
# Attribute of a buffer that modules of several places have: its name in the last of them.
SHARED = "mpipipe_shared"


def tie_shared(modules: Mapping[int, Any]) -> None:
    """Mark parameters that modules of several places share, and give each later place a parameter
    of its own.

    The key is the name of the first place, so all ranks find the same one. The pipeline keeps tied
    parameters equal.
    """
    parameters: dict[int, str] = {}  # id -> name of the first place
    owners: dict[int, str] = {}  # of modules within
    buffers: dict[int, tuple[int, Any]] = {}  # id -> first place, and the buffer
    for place, module in modules.items():
        mine = {id(each) for each in module.parameters()}
        shared = [each for each in module.parameters() if id(each) in parameters]
        for name, parent in [*module.named_modules()]:
            for key, part in [*parent._modules.items()]:
                if part is not None and id(part) in owners and any(True for _ in part.parameters()):
                    _refuse_state(part, f"{place}.{name}.{key}", owners[id(part)])
                    parent._modules[key] = copy.deepcopy(part)
                    shared += [*part.parameters()]
                    _mark(part, parent._modules[key], parameters)
        for part in module.modules():
            for key, each in [*part._parameters.items()]:
                if each is not None and id(each) in parameters:
                    each.__dict__.setdefault(TIE, parameters[id(each)])
                    part._parameters[key] = _twin(each)
        for name, buffer in module.named_buffers():
            if buffers.setdefault(id(buffer), (place, buffer))[0] != place:
                buffer.__dict__[SHARED] = buffers[id(buffer)][1].__dict__[SHARED] = (
                    f"{place}.{name}"
                )
        for name, each in module.named_parameters():
            if id(each) in mine:
                parameters.setdefault(id(each), f"{place}.{name}")
        for name, part in module.named_modules():
            owners.setdefault(id(part), f"{place}.{name}".rstrip("."))


def _mark(part: Any, twin: Any, parameters: Mapping[int, str]) -> None:
    for each, other in zip(part.parameters(), twin.parameters(), strict=True):
        key = each.__dict__.setdefault(TIE, parameters.get(id(each)))
        other.__dict__[TIE] = key


def _twin(parameter: Any) -> Any:
    twin = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    twin.__dict__[TIE] = parameter.__dict__[TIE]
    return twin


def _refuse_state(part: Any, name: str, first: str) -> None:
    if any(True for _ in part.buffers()):
        raise ArgumentError(
            f"one {type(part).__name__} with buffers is in two layers, {first} and {name}",
            expected="a module of its own in each layer: statistics of one would not be those of "
            "the other",
            remedy="make a second one, and let it share parameters: second.weight = first.weight",
        )
