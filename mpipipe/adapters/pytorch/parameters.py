"""The trainable parameters of a module as one flat array, and their gradients as another.

    flat array     | weight            | bias   |     of numpy or CuPy: optimizers, norms, sums over replicas
    parameters     |  .data of weight  | of bias|     of PyTorch: the module, torch.optim

Both are one memory. A parameter stays the object that it was, so that an optimizer of PyTorch may have it already. What
PyTorch calls "no gradient" (`zero_grad()` sets `.grad` to None) is a gradient of zeros here: whoever asks for the flat
array of gradients finds it so, and finds `.grad` on its memory again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpipipe import arrays
from mpipipe.adapters.pytorch.tensors import FLOATING, Tensor, array_of, tensor_of
from mpipipe.adapters.trees import Structures, gradient_leaves, tree_of, unflatten_parts
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Branches
from mpipipe.errors import ArgumentError
from mpipipe.nn.parameters import FlatBuffer


class TrainedParameter(NamedTuple):
    """One trainable parameter.

    Attributes
    ----------
    name : in the module
    owner, key : the module that has it, and under which name
    parameter : itself
    address : of its memory
    gradient : the tensor on the flat array of gradients that its `.grad` is
    """

    name: str
    owner: Any
    key: str
    parameter: Tensor
    address: int
    gradient: Tensor


class TorchGradients(Mapping[str, Array]):
    """Gradients by name, with `flat` and `offsets`, as nn.FlatBuffer has them, in step with `.grad`."""

    def __init__(self, buffer: FlatBuffer, parameters: TorchParameters):
        self._buffer, self._parameters = buffer, parameters

    @property
    def flat(self) -> Array:
        """The flat array, with what `.grad` of each parameter holds."""
        self._parameters.check()
        self._parameters.adopt_gradients()
        return self._buffer.flat

    @property
    def offsets(self) -> dict[str, int]:
        """Where each array starts in it."""
        return self._buffer.offsets

    def __getitem__(self, name: str) -> Array:
        self._parameters.adopt_gradients()
        return self._buffer[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffer)

    def __len__(self) -> int:
        return len(self._buffer)


class TorchParameters:
    """The trainable parameters of a module, moved into one flat array.

    Parameters
    ----------
    module : whose parameters they are
    prefix : of their names here
    device : "cpu" or "cuda"

    Attributes
    ----------
    values, gradients : mappings with an array `flat`; None if nothing is trained
    pieces : the parameters
    """

    def __init__(self, module: Any, prefix: str, device: str):
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self.values: FlatBuffer | None = None
        self.gradients: TorchGradients | None = None
        self.pieces: list[TrainedParameter] = []
        if not trained:
            return
        kind = arrays.dtype(_one_dtype(trained))
        shapes = {f"{prefix}{name}": tuple(each.shape) for name, each in trained.items()}
        self.values, gradients = FlatBuffer(shapes, kind, device), FlatBuffer(shapes, kind, device)
        with torch.no_grad():
            for name, parameter in trained.items():
                value, gradient = (tensor_of(each[f"{prefix}{name}"]) for each in (self.values, gradients))
                value.copy_(parameter)
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                parameter.data, parameter.grad = value, gradient
                owner, _, key = name.rpartition(".")
                owned = module.get_submodule(owner)
                self.pieces.append(TrainedParameter(name, owned, key, parameter, value.data_ptr(), gradient))
        self.gradients = TorchGradients(gradients, self)

    def adopt_gradients(self) -> None:
        """Let each `.grad` be a view of the flat array; one that was replaced is copied there, and None is zero."""
        for piece in self.pieces:
            found = piece.parameter.grad
            if found is piece.gradient:
                continue
            with torch.no_grad():
                piece.gradient.zero_() if found is None else piece.gradient.copy_(found)
            piece.parameter.grad = piece.gradient

    def check(self) -> None:
        """Raise ArgumentError if a parameter is no longer in the flat array."""
        for name, owner, key, parameter, address, _ in self.pieces:
            if owner._parameters.get(key) is not parameter or not parameter.requires_grad:
                raise ArgumentError(
                    f"the parameter {name} of a module has been replaced or frozen since the stage was made",
                    expected="the trainable parameters that there were then",
                    remedy="load_state_dict without assign=True; freeze parameters first and make the stage then",
                )
            if parameter.data_ptr() != address:
                raise ArgumentError(
                    f"the parameter {name} of a module lies elsewhere than in the stage's flat array",
                    found=f"{parameter.dtype} on {parameter.device}",
                    expected="the memory, dtype and device that it had when the stage was made",
                    remedy="move and convert the module first (module.to, .double(), ...), and make the stage then",
                )

    def check_gradients(self) -> None:
        """Raise ArgumentError if a gradient has been replaced within a step: its sum would miss what comes now."""
        for piece in self.pieces:
            if piece.parameter.grad is not piece.gradient:
                found = piece.parameter.grad
                raise ArgumentError(
                    f"the gradient of the parameter {piece.name} was replaced within a step",
                    found="None" if found is None else f"another tensor, {found.dtype}{list(found.shape)}",
                    expected="gradients that nobody but the pipeline writes within a step",
                    remedy="call zero_grad() between steps, not in forward or in a loss",
                )


def _one_dtype(trained: Mapping[str, Tensor]) -> str:
    """The dtype of all parameters; raises ArgumentError if there are several, or none that arrays know."""
    uninitialised = [name for name, each in trained.items() if torch.nn.parameter.is_lazy(each)]
    if uninitialised:
        raise ArgumentError(
            "a module has parameters without a shape yet",
            found=uninitialised[0],
            remedy="run the module once before it becomes a stage",
        )
    kinds = {each.dtype: name for name, each in trained.items()}
    if len(kinds) > 1 or not kinds.keys() <= FLOATING.keys():
        raise ArgumentError(
            "the parameters of a module must have one dtype, since they lie in one array",
            found=", ".join(f"{kind} ({name})" for kind, name in kinds.items()),
            expected=f"one of {', '.join(FLOATING.values())}",
            remedy="module.to(dtype); for mixed precision float32 parameters and torch.autocast within forward",
        )
    return FLOATING[next(iter(kinds))]


# -- What a module was given and what it returned, from the forward of a micro-batch until its backward ---------------


class TorchSaved(NamedTuple):
    """What the forward of a micro-batch leaves for its backward.

    Attributes
    ----------
    inputs : tensors, of which those of a floating dtype take gradients
    structures : of the parts of the input
    outputs : tensors, in the order of the output's arrays
    output : structures of the parts of the output
    """

    inputs: list[Tensor]
    structures: Structures
    outputs: list[Tensor]
    output: Structures

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that take gradients."""
        return [each for each in self.inputs if each.requires_grad]


def taking_part(saved: TorchSaved, dy: Tree | Branches, gives: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that gradients flow back from, and those gradients."""
    leaves = gradient_leaves(dy, saved.output, gives)
    pairs = [(output, leaf) for output, leaf in zip(saved.outputs, leaves) if leaf is not None and output.requires_grad]
    return [output for output, _ in pairs], [tensor_of(leaf) for _, leaf in pairs]


def input_gradients(saved: TorchSaved, gradients: Sequence[Tensor | None], takes: Sequence[str]) -> Tree | Branches:
    """Return the input gradients: zeros for an input that no output depends on, None for integers."""
    found = iter(gradients)
    leaves: list[Array | None] = []
    for each in saved.inputs:
        gradient = next(found) if each.requires_grad else None
        if each.requires_grad and gradient is None:
            gradient = torch.zeros_like(each, memory_format=torch.contiguous_format)
        leaves.append(None if gradient is None else array_of(gradient))
    return tree_of(unflatten_parts(leaves, saved.structures), takes)
