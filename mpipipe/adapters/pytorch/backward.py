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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
        handle = register(_nothing)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


def _nothing(*_gradients: Tensor) -> None:
    return None


# -- The graph of a micro-batch --------------------------------------------------------------------


class AutogradGraph:
    """The nodes between outputs and inputs.

    Attributes
    ----------
    branching : dict
        Node of the trunk -> numbers of the parameters that its branches alone lead to.
    shared, apart : list of int
        Parameters with several branches, and those of outputs that depend on no input.
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
        self._numbers = {}
        for number, parameter in enumerate(parameters):
            self._numbers[get_gradient_edge(parameter).node] = number
        self._inputs = {get_gradient_edge(tensor).node for tensor in inputs}
        # Parameters that a node leads to; None for one of the trunk, which leads to an input.
        self._leads_to: dict[Node, frozenset[int] | None] = {}
        self.strange: list[Tensor] = []
        roots = [get_gradient_edge(tensor).node for tensor in outputs]
        for root in roots:
            self._visit(root)
        branching: dict[Node, set[int]] = {}
        for node, numbers in self._leads_to.items():
            if numbers is None:
                several = set(chain(*filter(None, map(self._leads_to.get, _inputs_of(node)))))
                if several:
                    branching[node] = several
        lone = list(chain(*filter(None, map(self._leads_to.get, roots))))
        times = Counter(chain(*branching.values(), lone))
        shared = set()
        for number, count in times.items():
            if count > 1:
                shared.add(number)
        self.shared = sorted(shared)
        self.apart = sorted({*lone} - shared)
        self.branching = {node: sorted(several - shared) for node, several in branching.items()}
        self.reentrant = any(type(node).__name__ == REENTRANT_NODE for node in self._leads_to)
        self.divisible = not self.reentrant and not self._is_whole()

    def _is_whole(self) -> bool:
        """True if one walk has to do everything."""
        for node in self._leads_to:
            if isinstance(node, BackwardCFunction):
                if node in self.branching or type(node).__name__ == COMPILED_NODE:
                    return True
        # These are gone through in both halves: where a second walk goes through everything, all
        # of them.
        twice: Iterable[Node] = self.branching
        if self.shared or self.apart:
            twice = self._leads_to
        return any(map(_has_hooks, twice))

    def _visit(self, root: Node) -> None:
        """Classify all nodes from this one on, without recursion: graphs are deep."""
        stack = [(root, False)]
        while stack:
            node, is_left = stack.pop()
            if node in self._leads_to:
                continue
            after = _inputs_of(node)
            if not is_left:
                stack.append((node, True))
                stack += [(other, False) for other in after if other not in self._leads_to]
                continue
            below = [self._leads_to[other] for other in after]
            if node in self._inputs or None in below:
                self._leads_to[node] = None
                continue
            if node in self._numbers:
                below.append(frozenset([self._numbers[node]]))
            elif not after and hasattr(node, "variable"):
                self.strange.append(node.variable)
            self._leads_to[node] = frozenset(chain(*filter(None, below)))


def _inputs_of(node: Node) -> list[Node]:
    """Return the nodes that come after one in a backward."""
    return [other for other, _ in node.next_functions if other is not None]


# -- The two halves --------------------------------------------------------------------------------


class SplitBackward:
    """A backward under way: inputs have their `.grad`, and those of parameters follow."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        hooked: bool,
    ):
        # Walks that are left: tensors or edges to begin at, their gradients, and parameters.
        self.parts: list[tuple[list[Any], list[Tensor], list[Tensor]]] = []
        if hooked or not parameters:
            graph = None
        else:
            graph = AutogradGraph(outputs, inputs, parameters)
        if graph is None or not graph.divisible:
            torch.autograd.backward(outputs, gradients)
            return
        if inputs:
            arrived = _walk_trunk(graph, outputs, gradients, inputs)
            for node, several in arrived.items():
                edges = []
                of_edges = []
                for place, gradient in enumerate(several):
                    if gradient is not None:
                        edges.append(GradientEdge(node, place))
                        of_edges.append(gradient)
                branch = list(map(parameters.__getitem__, graph.branching[node]))
                self.parts.append((edges, of_edges, branch))
        whole = list(map(parameters.__getitem__, sorted({*graph.shared, *graph.apart})))
        if whole:
            self.parts.append((list(outputs), list(gradients), whole))

    def finish(self) -> None:
        """Add the gradients of the parameters to their `.grad`.

        A graph may be kept by others, so nothing is freed.
        """
        while self.parts:
            edges, gradients, parameters = self.parts.pop()
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)


def _walk_trunk(
    graph: AutogradGraph,
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> dict[Node, tuple[Tensor | None, ...]]:
    """Compute the gradients of inputs; return those that arrive at each node with a branch."""
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = []
    for node, numbers in graph.branching.items():
        if numbers:
            handles.append(node.register_prehook(partial(setitem, arrived, node)))
    try:
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    return arrived
