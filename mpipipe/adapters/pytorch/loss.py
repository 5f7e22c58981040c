"""A loss function of PyTorch as the loss of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpipipe import arrays
from mpipipe.adapters.pytorch.arrays import array_of, is_differentiable, on_stream, tensors_of
from mpipipe.adapters.pytorch.checks import inputs_unchanged
from mpipipe.arrays import Tree
from mpipipe.arrays.trees import flatten, unflatten


class TorchLoss:
    """See `mpipipe.adapters.torch_loss`, which makes it."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, output: Tree, target: Tree, factor: float = 1.0) -> tuple[Any, Tree]:
        """Return (value, gradient of the output times `factor`)."""
        with on_stream(arrays.device_of(flatten(output)[0][0])), torch.enable_grad():
            outputs, structure = tensors_of(output)
            taking = [each.requires_grad_() for each in outputs if is_differentiable(each)]
            targets, shape = tensors_of(target)
            with inputs_unchanged([*outputs, *targets], "a loss", "the output or the targets"):
                value = self.function(unflatten(outputs, structure), unflatten(targets, shape))
            found = torch.autograd.grad(value, taking, torch.full_like(value, factor), allow_unused=True)
            slopes = iter(torch.zeros_like(x) if slope is None else slope for x, slope in zip(taking, found))
            gradient = unflatten([array_of(next(slopes)) if x.requires_grad else None for x in outputs], structure)
            return value.item() if value.device.type == "cpu" else array_of(value), gradient
