"""The backward of a module in two halves: gradients of its inputs first, those of its parameters later.

    output <- C <- B <- A <- input        trunk: nodes of the graph on a way from the outputs to an input
              |    |    |
              c    b    a                 branches: what leads from them to parameters alone

The first half walks the trunk alone, and keeps the gradient that arrives at each node with a branch. The second half
begins there, and walks the branches alone. So no node is gone through twice, but for one thing: PyTorch's nodes are
entered twice where they have a branch, each time for the part that is asked for. A parameter with several branches
(shared within the module) takes a second walk through the whole graph, for the gradients along the trunk would be
counted twice otherwise.

Some nodes cannot be divided: a function with a backward of its own (torch.autograd.Function) computes all its gradients
whichever are asked for, and a graph of torch.compile frees what it has read. Where such a function has parameters, or a
compiled graph is there at all, one walk computes everything in the first half, and the second only adds.

The idea of stopping at such nodes is that of PyTorch's own pipelines (torch.distributed.pipelining,
stage_backward_input and stage_backward_weight).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpipipe.adapters.pytorch.tensors import Tensor

COMPILED = "CompiledFunctionBackward"  # node of a graph that torch.compile has made


class BackwardPart(NamedTuple):
    """Where a walk for the gradients of some parameters begins."""

    edges: list[Any]  # tensors, or GradientEdges
    gradients: list[Tensor]
    parameters: list[int]  # by their numbers


class AutogradGraph:
    """What lies between outputs and inputs.

    Parameters
    ----------
    outputs, inputs, parameters : tensors that take part in the backward

    Attributes
    ----------
    branching : node of the trunk -> numbers of the parameters behind its branches
    shared : numbers of the parameters with several branches
    beside : numbers of the parameters of outputs that depend on no input
    strange : tensors that take gradients and are neither inputs nor parameters
    divisible : whether nodes can be gone through for a part of their gradients
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]):
        self._numbers = {get_gradient_edge(each).node: number for number, each in enumerate(parameters)}
        self._inputs = {get_gradient_edge(each).node for each in inputs}
        self._trunk: dict[Any, bool] = {}  # node -> whether a way to an input begins there
        self._behind: dict[Any, frozenset[int]] = {}  # node that is not in the trunk -> parameters behind it
        self.strange: list[Tensor] = []
        roots = [get_gradient_edge(each).node for each in outputs]
        for root in roots:
            self._visit(root)
        found: dict[Any, set[int]] = {}
        for node in (node for node, trunk in self._trunk.items() if trunk):
            behind = [self._behind[after] for after, _ in node.next_functions if after and not self._trunk[after]]
            if any(behind):
                found[node] = set().union(*behind)
        lone = [self._behind[root] for root in roots if not self._trunk[root]]
        times: dict[int, int] = {}
        for each in [*found.values(), *lone]:
            for number in each:
                times[number] = times.get(number, 0) + 1
        self.shared = sorted(number for number, count in times.items() if count > 1)
        self.beside = sorted({number for each in lone for number in each} - {*self.shared})
        self.branching = {node: sorted(numbers - {*self.shared}) for node, numbers in found.items()}
        own = [node for node in self._trunk if isinstance(node, BackwardCFunction)]
        self.divisible = not any(node in found or type(node).__name__ == COMPILED for node in own)

    def _visit(self, root: Any) -> None:
        """Classify all nodes behind this one, without recursion: graphs are deep."""
        stack = [(root, False)]
        while stack:
            node, left = stack.pop()
            if node in self._trunk:
                continue
            after = [each for each, _ in node.next_functions if each is not None]
            if not left:
                stack.append((node, True))
                stack += [(each, False) for each in after if each not in self._trunk]
                continue
            own = self._numbers.get(node)
            if not after and own is None and node not in self._inputs and hasattr(node, "variable"):
                self.strange.append(node.variable)
            self._trunk[node] = node in self._inputs or any(self._trunk[each] for each in after)
            if not self._trunk[node]:
                self._behind[node] = frozenset(() if own is None else (own,)).union(
                    *map(self._behind.__getitem__, after)
                )


class SplitBackward:
    """A backward under way: the gradients of the inputs are there, those of the parameters are still to come.

    Parameters
    ----------
    outputs, gradients : the outputs that take part, and their gradients
    inputs, parameters : with respect to which gradients are wanted

    Attributes
    ----------
    input_gradients : one for each input, None for one that no output depends on
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ):
        graph = AutogradGraph(outputs, inputs, parameters)
        self.input_gradients: Sequence[Tensor | None]
        self._parts: list[BackwardPart] = []
        self._found: list[Tensor | None] = []  # gradients of the parameters that are there already
        if not graph.divisible:
            found = torch.autograd.grad(outputs, [*inputs, *parameters], gradients, allow_unused=True)
            self.input_gradients, self._found = found[: len(inputs)], list(found[len(inputs) :])
            return
        arrived: dict[Any, tuple[Tensor | None, ...]] = {}
        self.input_gradients = ()
        handles = [node.register_prehook(_keeper(arrived, node)) for node, own in graph.branching.items() if own]
        try:
            if inputs:
                self.input_gradients = torch.autograd.grad(
                    outputs, inputs, gradients, retain_graph=True, allow_unused=True
                )
        finally:
            for handle in handles:
                handle.remove()
        self._parts += [_part(node, arrived[node], graph.branching[node]) for node in arrived]
        whole = sorted({*graph.shared, *graph.beside})
        if whole:
            self._parts.append(BackwardPart(list(outputs), list(gradients), whole))

    def finish(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of the parameters to their `.grad`. A graph may be kept by others, so nothing is freed."""
        _add(parameters, self._found)
        while self._parts:
            edges, gradients, numbers = self._parts.pop()
            wanted = [parameters[number] for number in numbers]
            found = torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
            _add(wanted, found)


def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients):
        if gradient is not None:
            parameter.grad.add_(gradient)


def _keeper(arrived: dict[Any, tuple[Tensor | None, ...]], node: Any) -> Any:
    """A hook that notes the gradients that arrive at a node."""

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    return keep


def _part(node: Any, gradients: tuple[Tensor | None, ...], numbers: list[int]) -> BackwardPart:
    """The walk through the branches of a node."""
    there = [(GradientEdge(node, place), each) for place, each in enumerate(gradients) if each is not None]
    return BackwardPart([edge for edge, _ in there], [each for _, each in there], numbers)
