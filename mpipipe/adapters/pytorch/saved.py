"""What a module was given and what it returned, from the forward of a micro-batch until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpipipe.adapters.pytorch.arrays import Tensor, array_of, tensor_of
from mpipipe.adapters.trees import leaves_like
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Structure, unflatten


class Saved(NamedTuple):
    """What the forward of a micro-batch leaves for its backward.

    Attributes
    ----------
    inputs : tensors, of which those of a floating dtype take gradients
    structure : of the input
    outputs : tensors, in the order of the output's arrays
    output : structure of the output
    """

    inputs: list[Tensor]
    structure: Structure
    outputs: list[Tensor]
    output: Structure

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that take gradients."""
        return [each for each in self.inputs if each.requires_grad]


def called(module: Any, inputs: Sequence[Tensor], structure: Structure) -> Any:
    """Return what a module returns for inputs of this structure."""
    if structure is None:
        return module(inputs[0])
    return module(*inputs) if isinstance(structure, int) else module(**dict(zip(structure, inputs)))


def taking_part(saved: Saved, dy: Tree) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that gradients flow back from, and those gradients."""
    leaves = leaves_like(dy, saved.output)
    pairs = [(output, leaf) for output, leaf in zip(saved.outputs, leaves) if leaf is not None and output.requires_grad]
    return [output for output, _ in pairs], [tensor_of(leaf) for _, leaf in pairs]


def input_gradients(saved: Saved, gradients: Sequence[Tensor | None]) -> Tree:
    """Return the tree of input gradients: zeros for an input that no output depends on, None for integers."""
    found = iter(gradients)
    leaves: list[Array | None] = []
    for each in saved.inputs:
        gradient = next(found) if each.requires_grad else None
        if each.requires_grad and gradient is None:
            gradient = torch.zeros_like(each, memory_format=torch.contiguous_format)
        leaves.append(None if gradient is None else array_of(gradient))
    return unflatten(leaves, saved.structure)
