"""A loss function of PyTorch, or a module with parameters of its own, as the loss of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

from mpipipe import arrays
from mpipipe.adapters.foreign import floating_of
from mpipipe.adapters.pytorch.backward import AutogradGraph
from mpipipe.adapters.pytorch.state import ModuleState
from mpipipe.adapters.pytorch.tensors import Tensor, described, on_stream, slope_of
from mpipipe.arrays import Tree, array_of, flatten, tensor_of, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position, random_seed


class TorchLoss:
    """See `mpipipe.adapters.torch_loss`, which makes it.

    `is_trained` says whether the parameters of a module lie in a stage, which the optimizers of
    that stage see.
    """

    is_trained = False
    # True once a graph has been looked at for tensors whose gradients are summed nowhere.
    _looked = False

    def __init__(self, function: Callable[..., object], seed: int):
        self.function = function
        self.seed = seed
        self.is_module = isinstance(function, torch.nn.Module)
        # Of a function it is a module with nothing in it.
        self.module: torch.nn.Module = function if self.is_module else torch.nn.Module()
        self._state = ModuleState(self.module)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the loss that are to be trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def __call__(
        self,
        output: Tree,
        target: Tree,
        factor: float = 1.0,
        position: Position | None = None,
        weigh: Callable[[float | None], float] | None = None,
    ) -> tuple[Any, ...]:
        """Return (value, gradient of the output times `factor`), and the weight if there is one.

        `weigh` makes of the weight a further factor, for all gradients.
        """
        leaves, structure = flatten(output)
        device = arrays.device_of(leaves[0])
        seed = random_seed("torch loss", self.seed, *(position or Position())[:3])
        with on_stream(device), torch.enable_grad(), self._state.drawing(device, seed, position):
            outputs = list(map(tensor_of, leaves))
            taking = list(compress(outputs, floating_of(leaves)))
            for tensor in taking:
                tensor.requires_grad_()
            # The memory belongs to a stage or to the user, and a function may write to copies.
            copies = unflatten([tensor.clone() for tensor in outputs], structure)
            targets = arrays.mapped(lambda leaf: tensor_of(leaf).clone(), target)
            result = self.function(copies, targets)
            value, *weight = result if isinstance(result, tuple) else (result,)
            weight = list(map(float, weight))
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ArgumentError(
                    "the value of a loss",
                    found=f"{type(value).__name__} of shape {getattr(value, 'shape', ())}",
                    expected="a tensor of one number, or a tuple of it and a weight",
                )
            if weigh is not None:
                factor *= weigh(weight[0] if weight else None)
            if value.requires_grad and not self._looked:
                self._look(value, taking)
            if position is not None and position.training:
                taking += self.parameters
            # A weight of 0 may come with NaN.
            if value.requires_grad and factor:
                torch.autograd.backward(value, torch.full_like(value, factor), inputs=taking)
            slopes = [slope_of(tensor) if tensor.requires_grad else None for tensor in outputs]
            number = value.item() if value.is_cpu else array_of(value.detach())
            return (number, unflatten(slopes, structure), *weight)

    def _look(self, value: Tensor, taking: Sequence[Tensor]) -> None:
        """Raise ArgumentError for a loss that depends on a tensor which no stage trains."""
        parameters = self.parameters
        strange = AutogradGraph([value], taking, parameters).strange
        if strange:
            raise ArgumentError(
                "a loss depends on a tensor with a gradient that is neither the output nor a "
                "parameter of the loss",
                found=described(strange),
                expected="a function of output and target, or a torch.nn.Module with its own "
                "parameters",
                remedy="compute what needs the model in the last stage, or detach the tensor",
            )
        if parameters and not self.is_trained:
            raise ArgumentError(
                "a loss has parameters that no stage trains",
                found=f"{type(self.module).__name__} with {len(parameters)} trainable parameters",
                expected="parameters in the last stage, where optimizers and replicas see them",
                remedy="torch_stage(module, loss=loss), or the loss as last entry of a list of "
                "layers; or loss.requires_grad_(False)",
            )
        self._looked = True
