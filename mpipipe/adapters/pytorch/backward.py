"""The backward of a module in two halves: first gradients of inputs, later those of parameters.

    output <- C <- B <- A <- input     trunk: nodes of the graph from the outputs to an input
              |    |    |
              c    b    a              branches: what leads from them to parameters alone

The first half walks the trunk alone, and keeps the gradient that arrives at each node with a
branch. The second half begins there, and walks the branches alone. So no node is gone through
twice, but for one thing: PyTorch's nodes are entered twice where they have a branch, each time for
the part that is asked for. A parameter with several branches (shared within the module) takes a
second walk through the whole graph, for the gradients along the trunk would be counted twice
otherwise.

Some graphs cannot be divided. A function with a backward of its own (torch.autograd.Function)
computes all its gradients whichever are asked for, a graph of torch.compile frees what it has read,
and a hook would act in both walks. There the first half does everything, and the second nothing.

The idea of stopping at such nodes is that of PyTorch's own pipelines (torch.distributed.pipelining,
stage_backward_input and stage_backward_weight).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import setitem
from typing import Any, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpipipe.adapters.foreign import THREAD

# torch.Tensor: PyTorch may be missing where types are checked.
Tensor: TypeAlias = Any
Node: TypeAlias = Any

# A walk through a part of a graph: tensors or edges to begin at, their gradients, and parameters.
Walk: TypeAlias = "tuple[Sequence[Any], Sequence[Tensor], list[Tensor]]"

# Node of a graph that torch.compile has made.
COMPILED_NODE = "CompiledFunctionBackward"
# Node of torch.utils.checkpoint, which has its parameters to itself.
REENTRANT_NODE = "CheckpointFunctionBackward"


# -- Hooks of tensors, which a graph does not show -------------------------------------------------


register_hook = torch.Tensor.register_hook


def _counted_register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> object:
    THREAD.hooks += 1
    return register_hook(tensor, hook)


torch.Tensor.register_hook = _counted_register_hook


def _has_hooks(node: Node) -> bool:
    """True if a hook is registered at a node: a handle of ours shows the hooks of all."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_gradients: None)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


# -- The graph of a micro-batch --------------------------------------------------------------------


class AutogradGraph:
    """The nodes between outputs and inputs.

    Attributes
    ----------
    branching : dict
        Node of the trunk -> the parameters that its branches alone lead to.
    again : set of Tensor
        Parameters with several branches, or of outputs that depend on no input: a second walk goes
        through everything for these.
    strange : list of Tensor
        Tensors that take gradients and are neither inputs nor parameters.
    divisible : bool
        Whether nodes can be gone through for a part of their gradients.
    reentrant : bool
        Whether something within needs an input with a gradient, to have those of its parameters.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ):
        # A tensor is equal to itself alone in a set or a dict.
        self._parameters = {get_gradient_edge(tensor).node: tensor for tensor in parameters}
        self._inputs = {get_gradient_edge(tensor).node for tensor in inputs}
        # Parameters that a node leads to; None for one of the trunk, which leads to an input.
        self._leads_to: dict[Node, set[Tensor] | None] = {}
        self.strange: list[Tensor] = []
        self.branching: dict[Node, set[Tensor]] = {}
        roots = [get_gradient_edge(tensor).node for tensor in outputs]
        self._classify(roots)
        self.again = self._parameters_of(roots)
        met: set[Tensor] = set()
        for branch in self.branching.values():
            self.again |= met & branch
            met |= branch
        for branch in self.branching.values():
            branch -= self.again
        kinds = {type(node).__name__ for node in self._leads_to}
        self.reentrant = REENTRANT_NODE in kinds
        # These are gone through in both halves.
        twice: Iterable[Node] = self._leads_to if self.again else self.branching
        self.divisible = not (
            kinds & {REENTRANT_NODE, COMPILED_NODE}
            or any(isinstance(node, BackwardCFunction) for node in self.branching)
            or any(map(_has_hooks, twice))
        )

    def _parameters_of(self, nodes: Iterable[Node]) -> set[Tensor]:
        """Return the parameters that those of the nodes lead to which lead to no input."""
        return {*chain(*filter(None, map(self._leads_to.get, nodes)))}

    def _classify(self, roots: Sequence[Node]) -> None:
        """Classify all nodes from these on, without recursion: graphs are deep."""
        stack = [*roots]
        while stack:
            node = stack[-1]
            after = [other for other, _ in node.next_functions if other is not None]
            waiting = [other for other in after if other not in self._leads_to]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if node in self._leads_to:
                continue
            below = self._parameters_of(after)
            if node in self._inputs or None in map(self._leads_to.get, after):
                self._leads_to[node] = None
                if below:
                    self.branching[node] = below
                continue
            if node in self._parameters:
                below.add(self._parameters[node])
            elif not after and hasattr(node, "variable"):
                self.strange.append(node.variable)
            self._leads_to[node] = below


# -- The two halves --------------------------------------------------------------------------------


def begin_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> list[Walk]:
    """Compute the `.grad` of inputs; return the walks that are left for those of parameters."""
    graph = AutogradGraph(outputs, inputs, parameters)
    if not graph.divisible:
        torch.autograd.backward(outputs, gradients)
        return []
    walks: list[Walk] = []
    # Gradients that arrive at each node with a branch.
    arrived: dict[Node, Sequence[Tensor]] = {}
    if inputs:
        with ExitStack() as hooks:
            for node, branch in graph.branching.items():
                if branch:
                    hooks.enter_context(node.register_prehook(partial(setitem, arrived, node)))
            torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=inputs)
    for node, several in arrived.items():
        edges = []
        of_edges = []
        for place, gradient in enumerate(several):
            if gradient is not None:
                edges.append(GradientEdge(node, place))
                of_edges.append(gradient)
        walks.append((edges, of_edges, [*graph.branching[node]]))
    if graph.again:
        walks.append((outputs, gradients, [*graph.again]))
    return walks


def finish_backward(walks: list[Walk]) -> None:
    """Add the gradients of the parameters to their `.grad`.

    A graph may be kept by others, so nothing is freed.
    """
    while walks:
        begins, gradients, parameters = walks.pop()
        torch.autograd.backward(begins, gradients, retain_graph=True, inputs=parameters)
