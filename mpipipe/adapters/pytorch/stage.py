"""A module of PyTorch as a stage of a pipeline, and its backward, whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import setitem
from time import perf_counter
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpipipe import arrays
from mpipipe.adapters.layers import drawing_turn
from mpipipe.adapters.pytorch.attend import TorchAttend
from mpipipe.adapters.pytorch.tensors import (
    ModuleBuffers,
    Tensor,
    TorchParameters,
    check_module,
    device_of,
    flatten_output,
    inputs_unchanged,
    is_differentiable,
    modules_for_hooks,
    on_stream,
)
from mpipipe.adapters.trees import Structures, Tape, TreeStage, applied, flatten_parts, returned, unflatten_parts
from mpipipe.arrays import Array, Tree, array_of, flatten, tensor_of, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import FlatBuffer, Parameter, Position

BETWEEN_POLLS = 1e-3  # seconds at least: a poll and its hook in the backward take up to 60 us where caches are cold
BACKWARD = "the backward of a module", "the gradient that it is given"


class TorchStage(TreeStage):
    """See `mpipipe.adapters.torch_stage`, which makes it.

    `parameters` and `gradients` are None, or the trainable ones: views of one array `.flat` each, on the memory of the
    module's. A pipeline sets `poll`, which lets messages move; it is called after modules within that have matrices,
    every millisecond at most, and while a `TorchAttend` within computes.
    """

    def __init__(self, module: Any, prefix: str = "", *common: Any, storage: tuple[Mapping, Mapping] | None = None):
        check_module(module)
        super().__init__("torch_stage", *common)
        self.module, self.prefix = module, prefix
        self.poll: Callable[[], object] | None = None
        self._polled = 0.0  # seconds of a clock
        places = {device_of(each) for each in (*module.parameters(), *module.buffers())} or {("cpu", None)}
        if len(places) > 1:
            raise ArgumentError(
                "a module on several devices",
                found=sorted(map(str, places)),
                expected="one",
                remedy="module.to(device)",
            )
        self.device, self.gpu = places.pop()
        with on_stream(self.device):
            self._trained = TorchParameters(module, prefix, self.device, storage)
        self.parameters = self._trained.values
        self._parameters = [piece.parameter for piece in self._trained.pieces]
        self._buffers = ModuleBuffers(module)
        self._looked = False  # whether a graph has been looked at for tensors whose gradients are summed nowhere
        for each in modules_for_hooks(module):
            each.register_forward_hook(self._move_messages)
        for each in module.modules():
            if isinstance(each, TorchAttend):
                each.attend.poll = self._poll

    @property
    def gradients(self) -> FlatBuffer | None:
        """Their gradients, with what `.grad` of each parameter holds, or None."""
        return self._trained.adopted_gradients()

    def refresh(self) -> None:
        """Look whether the parameters are where they were. A pipeline does this at the start of each call."""
        self._trained.check()

    def _computing(self) -> AbstractContextManager[Any]:
        return on_stream(self.device)

    def _forward(
        self, leaves: list[Array], structures: Structures, position: Position
    ) -> tuple[list[Array], Structures, Tape | None]:
        with self._random(position), torch.set_grad_enabled(position.training):
            if self.module.training != position.training:
                self.module.train(position.training)
            inputs = [tensor_of(leaf) for leaf in leaves]
            # the first time, too, where nobody asks: what refuses to be differentiated in part raises its error then
            differentiates = position.training and not (self.ends and self._looked)
            for each in inputs:
                each.requires_grad_(differentiates and is_differentiable(each))
            with inputs_unchanged(inputs), self._buffers.unchanged():
                output = applied(self.module, (), unflatten_parts(inputs, structures))
                outputs, shapes = flatten_parts(returned(output, self.gives), flatten_output)
            found = [array_of(each) for each in outputs]
        if not position.training:
            return found, shapes, None
        taking, differentiable = ([each for each in some if each.requires_grad] for some in (inputs, outputs))
        if not self._looked:
            self._look(taking, differentiable)
        which = (tuple(each.requires_grad for each in some) for some in (inputs, outputs))
        return found, shapes, Tape((taking, differentiable), structures, next(which), shapes, next(which))

    def _backward(self, slopes: list[Array | None], saved: Tape) -> list[Array]:
        self._trained.check_gradients()
        inputs, outputs, gradients = taking_part(slopes, saved)
        if outputs:
            with inputs_unchanged(gradients, *BACKWARD):
                torch.autograd.backward(outputs, gradients, inputs=[*inputs, *self._parameters])
        return input_gradients(inputs, [each.grad for each in inputs])

    def _backward_input(self, slopes: list[Array | None], saved: Tape) -> tuple[list[Array], SplitBackward | None]:
        inputs, outputs, gradients = taking_part(slopes, saved)
        if not outputs:
            return input_gradients(inputs, [None for _ in inputs]), None
        with inputs_unchanged(gradients, *BACKWARD):
            split = SplitBackward(outputs, gradients, inputs, self._parameters)
        return input_gradients(inputs, split.input_gradients), split

    def _backward_weight(self, pending: SplitBackward | None) -> None:
        self._trained.check_gradients()
        if pending is not None:
            pending.finish(self._parameters)

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and persistent buffers by the module's names, after the prefix: views where they can be."""
        return {
            f"{self.prefix}{name}": array_of(_stored(name, each)) for name, each in self.module.state_dict().items()
        }

    def load_state_dict(self, values: Mapping[str, Array]) -> None:
        """Set parameters and buffers."""
        for function in tuple(self.before_write):
            function()
        found = {name.removeprefix(self.prefix): tensor_of(array) for name, array in values.items()}
        self.module.load_state_dict(found)

    @contextmanager
    def _random(self, position: Position) -> Iterator[None]:
        """Draw the random numbers of this place within, whatever else is drawn before or at the same time."""
        generator = torch.default_generator if self.gpu is None else torch.cuda.default_generators[self.gpu]
        with drawing_turn():
            state = generator.get_state()
            generator.manual_seed(int(self.key("torch", position)[0]) >> 1)
            try:
                yield
            finally:
                generator.set_state(state)

    def _move_messages(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Poll when a module has ended its forward, and when it begins its backward; but not all the time."""
        if self.poll is not None and perf_counter() > self._polled + BETWEEN_POLLS:
            self._polled = perf_counter()
            self.poll()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._poll)

    def _poll(self, _gradient: Tensor | None = None) -> None:
        if self.poll is not None:
            self.poll()

    def _look(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Raise ArgumentError if the output depends on a tensor whose gradient is summed and used nowhere."""
        strange = AutogradGraph(outputs, inputs, self._parameters).strange
        if strange:
            raise ArgumentError(
                "the output of a module depends on a tensor with a gradient that is none of its parameters",
                found=", ".join(f"{each.dtype}{list(each.shape)}" for each in strange),
                expected="parameters that the module had when the stage was made",
                remedy="register it as torch.nn.Parameter before, or detach it",
            )
        self._looked = True


# -- A module as a layer of a stage, in whose buffers its parameters lie -----------------------------------------------


def declared_by(module: Any) -> dict[str, Parameter]:
    """Return the parameters of a module by name, as a layer declares them: with the values that they have now."""
    check_module(module)
    named = dict(module.named_parameters())
    strange = [name for name, each in named.items() if each.dtype.is_complex]
    if strange:
        raise ArgumentError(
            f"the parameter {strange[0]} of a module is complex",
            expected="real parameters",
            remedy="keep real and imaginary parts as a last axis of 2",
        )
    return {
        name: Parameter(
            tuple(each.shape),
            lambda *_, each=each: each.detach().double().cpu().numpy(),
            decay=each.ndim > 1,
            frozen=not each.requires_grad,
        )
        for name, each in named.items()
    }


def stage_on(module: Any, values: Mapping[str, Array], gradients: Mapping[str, Any], seed: int) -> TorchStage:
    """Return a stage of a module whose parameters are these arrays; one whose gradient is None is frozen."""
    for name, parameter in module.named_parameters():
        value = tensor_of(values[name])
        module.to(value.device, value.dtype)
        parameter.data = value
        parameter.requires_grad_(gradients[name] is not None)
    return TorchStage(module, "", seed, storage=(values, gradients))


def counted(stage: TorchStage, x: Tree, position: Position) -> tuple[Any, dict[int, int]]:
    """Return what the forward returns, and what PyTorch keeps for its backward: bytes by the address of the memory."""
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        held[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = stage.forward(x, position)
    for tensor in () if found[1] is None else chain(*found[1].kept):
        note(tensor)
    return found, held


def _stored(name: str, value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"the state of a module is no tensor: {name}",
            found=type(value).__name__,
            expected="tensors alone: nothing else is written to checkpoints",
            remedy="leave out get_extra_state, and keep such facts in the state of the checkpoint",
        )
    return value


# -- A loss function of PyTorch as the loss of a pipeline -------------------------------------------------------------


class TorchLoss:
    """See `mpipipe.adapters.torch_loss`, which makes it."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, output: Tree, target: Tree, factor: float = 1.0) -> tuple[Any, Tree]:
        """Return (value, gradient of the output times `factor`)."""
        with on_stream(arrays.device_of(flatten(output)[0][0])), torch.enable_grad():
            (leaves, structure), (wanted, shape) = flatten(output), flatten(target)
            outputs, targets = [*map(tensor_of, leaves)], [*map(tensor_of, wanted)]
            taking = [each.requires_grad_() for each in outputs if is_differentiable(each)]
            with inputs_unchanged([*outputs, *targets], "a loss", "the output or the targets"):
                value = self.function(unflatten(outputs, structure), unflatten(targets, shape))
            found = torch.autograd.grad(value, taking, torch.full_like(value, factor), allow_unused=True)
            slopes = iter(torch.zeros_like(x) if slope is None else slope for x, slope in zip(taking, found))
            gradient = unflatten([array_of(next(slopes)) if x.requires_grad else None for x in outputs], structure)
            return value.item() if value.device.type == "cpu" else array_of(value), gradient


# -- The backward of a module ------------------------------------------------------------------------------------------


def taking_part(slopes: list[Array | None], saved: Tape) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the inputs that take gradients, the outputs that gradients flow back from, and those gradients."""
    inputs, outputs = saved.kept
    pairs = [(output, tensor_of(slope)) for output, slope in zip(outputs, slopes) if slope is not None]
    return inputs, [output for output, _ in pairs], [slope for _, slope in pairs]


def input_gradients(inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Array]:
    """Return the input gradients as arrays: zeros for an input that no output depends on."""
    pairs = zip(inputs, gradients)
    return [array_of(torch.zeros_like(x, memory_format=torch.contiguous_format) if g is None else g) for x, g in pairs]


# -- The backward of a module in two halves: gradients of its inputs first, those of its parameters later -------------
#
#     output <- C <- B <- A <- input        trunk: nodes of the graph on a way from the outputs to an input
#               |    |    |
#               c    b    a                 branches: what leads from them to parameters alone
#
# The first half walks the trunk alone, and keeps the gradient that arrives at each node with a branch. The second half
# begins there, and walks the branches alone. So no node is gone through twice, but for one thing: PyTorch's nodes are
# entered twice where they have a branch, each time for the part that is asked for. A parameter with several branches
# (shared within the module) takes a second walk through the whole graph, for the gradients along the trunk would be
# counted twice otherwise.
#
# Some nodes cannot be divided: a function with a backward of its own (torch.autograd.Function) computes all its
# gradients whichever are asked for, and a graph of torch.compile frees what it has read. Where such a function has
# parameters, or a compiled graph is there at all, one walk computes everything in the first half, and the second only
# adds.
#
# The idea of stopping at such nodes is that of PyTorch's own pipelines (torch.distributed.pipelining,
# stage_backward_input and stage_backward_weight).


COMPILED_NODE = "CompiledFunctionBackward"  # node of a graph that torch.compile has made


class AutogradGraph:
    """What lies between outputs and inputs.

    branching : node of the trunk -> numbers of the parameters that its branches lead to
    shared, apart : numbers of the parameters with several branches, and of those of outputs that depend on no input
    strange : tensors that take gradients and are neither inputs nor parameters
    divisible : whether nodes can be gone through for a part of their gradients
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]):
        self._numbers = {get_gradient_edge(each).node: number for number, each in enumerate(parameters)}
        self._inputs = {get_gradient_edge(each).node for each in inputs}
        self._trunk: dict[Any, bool] = {}  # node -> whether it leads to an input
        self._leads_to: dict[Any, frozenset[int]] = {}  # node that is not in the trunk -> the parameters it leads to
        self.strange: list[Tensor] = []
        roots = [get_gradient_edge(each).node for each in outputs]
        for root in roots:
            self._visit(root)
        found: dict[Any, set[int]] = {}
        for node in (node for node, trunk in self._trunk.items() if trunk):
            several = [self._leads_to[after] for after, _ in node.next_functions if after and not self._trunk[after]]
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
        own = [node for node in self._trunk if isinstance(node, BackwardCFunction)]
        self.divisible = not any(node in found or type(node).__name__ == COMPILED_NODE for node in own)

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


class SplitBackward:
    """A backward under way: the gradients of the inputs are there, those of the parameters are still to come.

    `input_gradients` has one for each input, None for one that no output depends on.
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
        # walks for the gradients of some parameters: tensors or GradientEdges to begin at, gradients, numbers of these
        self._parts: list[tuple[list[Any], list[Tensor], list[int]]] = []
        self._found: list[Tensor | None] = []  # gradients of the parameters that are there already
        if not graph.divisible:
            found = torch.autograd.grad(outputs, [*inputs, *parameters], gradients, allow_unused=True)
            self.input_gradients, self._found = found[: len(inputs)], list(found[len(inputs) :])
            return
        arrived: dict[Any, tuple[Tensor | None, ...]] = {}
        self.input_gradients = ()
        handles = [
            node.register_prehook(partial(setitem, arrived, node)) for node, own in graph.branching.items() if own
        ]
        try:
            if inputs:
                self.input_gradients = torch.autograd.grad(
                    outputs, inputs, gradients, retain_graph=True, allow_unused=True
                )
        finally:
            for handle in handles:
                handle.remove()
        self._parts += [_part(node, arrived[node], graph.branching[node]) for node in arrived]
        whole = sorted({*graph.shared, *graph.apart})
        if whole:
            self._parts.append((list(outputs), list(gradients), whole))

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


def _part(node: Any, gradients: tuple[Tensor | None, ...], numbers: list[int]) -> tuple[Any, Any, list[int]]:
    """The walk through the branches of a node."""
    there = [(GradientEdge(node, place), each) for place, each in enumerate(gradients) if each is not None]
    return [edge for edge, _ in there], [each for _, each in there], numbers
