"""The backward of a module in two halves: gradients of its inputs first, those of its parameters
later.

    output <- C <- B <- A <- input        trunk: nodes of the graph on a way from the outputs to an input
              |    |    |
              c    b    a                 branches: what leads from them to parameters alone

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

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import setitem
from typing import Any, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Tensor: TypeAlias = Any  # torch.Tensor: PyTorch may be missing where types are checked

COMPILED_NODE = "CompiledFunctionBackward"  # node of a graph that torch.compile has made
REENTRANT_NODE = (
    "CheckpointFunctionBackward"  # of torch.utils.checkpoint, which has its parameters to itself
)


# -- Hooks of tensors, which a graph does not show -------------------------------------------------


class HookCount(threading.local):
    """How many hooks of tensors this thread has registered."""

    value = 0


HOOKS = HookCount()
register_hook = torch.Tensor.register_hook


def _counted_register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
    HOOKS.value += 1
    return register_hook(tensor, hook)


torch.Tensor.register_hook = _counted_register_hook


def _has_hooks(node: Any) -> bool:
    """Whether somebody has registered a hook at a node: a handle of ours shows the hooks of all."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


def _nothing(*_gradients: Any) -> None:
    return None


# -- The graph of a micro-batch --------------------------------------------------------------------


class AutogradGraph:
    """What lies between outputs and inputs.

    branching : node of the trunk -> numbers of the parameters that its branches lead to shared,
    apart : numbers of the parameters with several branches, and of those of outputs that depend on
    no input strange : tensors that take gradients and are neither inputs nor parameters divisible :
    whether nodes can be gone through for a part of their gradients reentrant : whether something
    within needs an input with a gradient, to have the gradients of its parameters
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ):
        self._numbers = {
            get_gradient_edge(each).node: number for number, each in enumerate(parameters)
        }
        self._inputs = {get_gradient_edge(each).node for each in inputs}
        self._trunk: dict[Any, bool] = {}  # node -> whether it leads to an input
        self._leads_to: dict[
            Any, frozenset[int]
        ] = {}  # node that is not in the trunk -> the parameters it leads to
        self.strange: list[Tensor] = []
        roots = [get_gradient_edge(each).node for each in outputs]
        for root in roots:
            self._visit(root)
        found: dict[Any, set[int]] = {}
        for node in (node for node, trunk in self._trunk.items() if trunk):
            several = [
                self._leads_to[after]
                for after, _ in node.next_functions
                if after and not self._trunk[after]
            ]
            if any(several):
                found[node] = set().union(*several)
        lone = [self._leads_to[root] for root in roots if not self._trunk[root]]
        times: dict[int, int] = {}
        for each in [*found.values(), *lone]:
            for number in each:
                times[number] = times.get(number, 0) + 1
        self.shared = sorted(number for number, count in times.items() if count > 1)
        self.apart = sorted({number for each in lone for number in each} - {*self.shared})
        self.branching = {node: sorted(numbers - {*self.shared}) for node, numbers in found.items()}
        self.reentrant = any(type(node).__name__ == REENTRANT_NODE for node in self._trunk)
        self.divisible = not self.reentrant and not self._is_whole(found)

    def _is_whole(self, branching: Iterable[Any]) -> bool:
        """Whether one walk has to do everything."""
        own = [node for node in self._trunk if isinstance(node, BackwardCFunction)]
        if any(node in branching or type(node).__name__ == COMPILED_NODE for node in own):
            return True
        # these are gone through in both halves: where a second walk goes through everything, all of
        # them
        twice = self._trunk if self.shared or self.apart else branching
        return any(_has_hooks(node) for node in twice)

    def _visit(self, root: Any) -> None:
        """Classify all nodes from this one on, without recursion: graphs are deep."""
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
                self._leads_to[node] = frozenset(() if own is None else (own,)).union(
                    *map(self._leads_to.__getitem__, after)
                )


# -- The two halves --------------------------------------------------------------------------------


class SplitBackward:
    """A backward under way: the gradients of the inputs are in their `.grad`, those of parameters
    may be to come.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        hooked: bool,
    ):
        # walks for some parameters: tensors or GradientEdges to begin at, gradients, and these
        # parameters
        self.parts: list[tuple[list[Any], list[Tensor], list[Tensor]]] = []
        graph = None if hooked or not parameters else AutogradGraph(outputs, inputs, parameters)
        if graph is None or not graph.divisible:
            torch.autograd.backward(outputs, gradients)
            return
        if inputs:
            self._walk_trunk(graph, outputs, gradients, inputs, parameters)
        whole = [parameters[number] for number in sorted({*graph.shared, *graph.apart})]
        if whole:
            self.parts.append((list(outputs), list(gradients), whole))

    def _walk_trunk(
        self,
        graph: AutogradGraph,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        arrived: dict[Any, tuple[Tensor | None, ...]] = {}
        branching = [node for node, own in graph.branching.items() if own]
        handles = [node.register_prehook(partial(setitem, arrived, node)) for node in branching]
        try:
            torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=inputs)
        finally:
            for handle in handles:
                handle.remove()
        for node, several in arrived.items():
            there = [
                (GradientEdge(node, place), each)
                for place, each in enumerate(several)
                if each is not None
            ]
            own = [parameters[number] for number in graph.branching[node]]
            self.parts.append(([edge for edge, _ in there], [each for _, each in there], own))

    def finish(self) -> None:
        """Add the gradients of the parameters to their `.grad`. A graph may be kept by others, so
        nothing is freed.
        """
        while self.parts:
            edges, gradients, parameters = self.parts.pop()
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)
