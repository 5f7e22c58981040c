"""What a module was given and what it returned, from the forward of a micro-batch until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpipipe.adapters.pytorch.arrays import Tensor, array_of, tensor_of
from mpipipe.adapters.trees import Structures, gradient_leaves, tree_of, unflatten_parts
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Branches


class Saved(NamedTuple):
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


def taking_part(saved: Saved, dy: Tree | Branches, gives: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that gradients flow back from, and those gradients."""
    leaves = gradient_leaves(dy, saved.output, gives)
    pairs = [(output, leaf) for output, leaf in zip(saved.outputs, leaves) if leaf is not None and output.requires_grad]
    return [output for output, _ in pairs], [tensor_of(leaf) for _, leaf in pairs]


def input_gradients(saved: Saved, gradients: Sequence[Tensor | None], takes: Sequence[str]) -> Tree | Branches:
    """Return the input gradients: zeros for an input that no output depends on, None for integers."""
    found = iter(gradients)
    leaves: list[Array | None] = []
    for each in saved.inputs:
        gradient = next(found) if each.requires_grad else None
        if each.requires_grad and gradient is None:
            gradient = torch.zeros_like(each, memory_format=torch.contiguous_format)
        leaves.append(None if gradient is None else array_of(gradient))
    return tree_of(unflatten_parts(leaves, saved.structures), takes)
