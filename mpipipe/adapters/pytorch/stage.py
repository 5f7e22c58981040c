"""A module of PyTorch as a stage of a pipeline or as a layer of one, and a loss of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from mpipipe.adapters.pytorch.attend import TorchAttend
from mpipipe.adapters.pytorch.backward import HOOKS, AutogradGraph, SplitBackward, register_hook
from mpipipe.adapters.pytorch.loss import LossParameters, TorchLoss
from mpipipe.adapters.pytorch.state import ModuleState, drawing
from mpipipe.adapters.pytorch.tensors import (
    Tensor,
    TorchParameters,
    as_kind_of,
    check_module,
    device_of,
    flatten_output,
    inputs_unchanged,
    is_differentiable,
    modules_for_hooks,
    on_stream,
    real_dtype,
    real_shape,
)
from mpipipe.adapters.pytorch.ties import TIE
from mpipipe.adapters.trees import Structures, Tape, TreeStage, applied, flatten_parts, returned, unflatten_parts
from mpipipe.arrays import Array, Tree, array_of, tensor_of
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

    def __init__(
        self,
        module: Any,
        prefix: str = "",
        *common: Any,
        loss: TorchLoss | None = None,
        storage: tuple[Mapping, Mapping] | None = None,
    ):
        check_module(module)
        super().__init__("torch_stage", *common)
        self.module, self.prefix = module, prefix
        self._modules = {prefix: module}  # by prefixes of names
        if loss is not None and loss.module is not None:
            self._modules[f"{prefix}loss."] = loss.module
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
            self._trained = TorchParameters(self._modules, self.device, storage)
        self.parameters = self._trained.values
        self._parameters = [piece.parameter for piece in self._trained.pieces]
        self._state = ModuleState(module)
        self._looked = False  # whether a graph has been looked at for tensors whose gradients are summed nowhere
        for each in modules_for_hooks(module):
            each.register_forward_hook(self._move_messages)
        for each in module.modules():
            if isinstance(each, TorchAttend):
                each.attend.poll = self._poll
            elif isinstance(each, LossParameters):
                each.loss.is_trained = True
        if loss is not None:
            loss.is_trained = True

    @property
    def gradients(self) -> FlatBuffer | None:
        """Their gradients, with what `.grad` of each parameter holds, or None."""
        return self._trained.adopted_gradients()

    def place(self, name: str, value: Array, gradient: Array | None) -> None:
        """Let one parameter and its gradient lie in these arrays."""
        self._trained.place(name, value, gradient)

    def begin(self) -> None:
        """Look where parameters are, and let each `.grad` be where its gradient is summed."""
        self._trained.adopted_gradients()

    def refresh(self) -> None:
        """Look whether the parameters are where they were. A pipeline does this at the start of each call."""
        self._trained.check()

    def _computing(self) -> AbstractContextManager[Any]:
        return on_stream(self.device)

    def _forward(
        self, leaves: list[Array], structures: Structures, position: Position
    ) -> tuple[list[Array], Structures, Tape | None]:
        with (
            drawing(self.gpu, self.key("torch", position), self._state, position),
            torch.set_grad_enabled(position.training),
        ):
            inputs = [tensor_of(leaf) for leaf in leaves]
            # the first time, too, where nobody asks: what refuses to be differentiated in part raises its error then
            differentiates = position.training and not (self.ends and self._looked)
            for each in inputs:
                each.requires_grad_(differentiates and is_differentiable(each))
            hooks = HOOKS.value
            # The memory of inputs belongs to another stage or to the user, and a module may write to copies.
            copies = [each.clone() for each in inputs]
            output = applied(self.module, (), unflatten_parts(copies, structures))
            outputs, shapes = flatten_parts(returned(output, self.gives), flatten_output)
            found = [array_of(each) for each in outputs]
        if not position.training:
            return found, shapes, None
        taking, differentiable = ([each for each in some if each.requires_grad] for some in (inputs, outputs))
        if not self._looked:
            self._look(taking, differentiable)
        which = (tuple(each.requires_grad for each in some) for some in (inputs, outputs))
        kept = taking, differentiable, HOOKS.value > hooks
        return found, shapes, Tape(kept, structures, next(which), shapes, next(which))

    def _backward(self, slopes: list[Array | None], saved: Tape) -> list[Array]:
        self._trained.check_gradients()
        inputs, outputs, gradients = taking_part(slopes, saved)
        if outputs:
            with inputs_unchanged(gradients, *BACKWARD):
                torch.autograd.backward(outputs, gradients)
        return input_gradients(inputs)

    def _backward_input(self, slopes: list[Array | None], saved: Tape) -> tuple[list[Array], SplitBackward | None]:
        self._trained.check_gradients()
        inputs, outputs, gradients = taking_part(slopes, saved)
        split = None
        if outputs:
            with inputs_unchanged(gradients, *BACKWARD):
                split = SplitBackward(outputs, gradients, inputs, self._parameters, saved.kept[2])
        return input_gradients(inputs), split

    def _backward_weight(self, pending: SplitBackward | None) -> None:
        self._trained.check_gradients()
        if pending is not None:
            pending.finish()

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and persistent buffers by the module's names, after the prefix: views where they can be."""
        return {
            f"{prefix}{name}": array_of(_stored(name, each))
            for prefix, module in self._modules.items()
            for name, each in module.state_dict().items()
        }

    def load_state_dict(self, values: Mapping[str, Array]) -> None:
        """Set parameters and buffers."""
        for function in tuple(self.before_write):
            function()
        for prefix, module in self._modules.items():
            own = {name: values[f"{prefix}{name}"] for name in module.state_dict()}
            module.load_state_dict({name: tensor_of(array) for name, array in own.items()})

    @property
    def buffers(self) -> dict[str, Array]:
        """The persistent buffers by the module's names, after the prefix: views where they can be."""
        parameters = {
            f"{prefix}{name}" for prefix, each in self._modules.items() for name, _ in each.named_parameters()
        }
        return {name: array for name, array in self.state_dict().items() if name not in parameters}

    def _move_messages(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Poll when a module has ended its forward, and when it begins its backward; but not all the time."""
        if self.poll is not None and perf_counter() > self._polled + BETWEEN_POLLS:
            self._polled = perf_counter()
            self.poll()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                register_hook(output, self._poll)

    def _poll(self, _gradient: Tensor | None = None) -> None:
        if self.poll is not None:
            self.poll()

    def _look(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Raise ArgumentError if the output depends on a tensor whose gradient is summed and used nowhere."""
        graph = AutogradGraph(outputs, inputs, self._parameters)
        strange = graph.strange
        if strange:
            raise ArgumentError(
                "the output of a module depends on a tensor with a gradient that is none of its parameters",
                found=", ".join(f"{each.dtype}{list(each.shape)}" for each in strange),
                expected="parameters that the module had when the stage was made",
                remedy="register it as torch.nn.Parameter before, or detach it",
            )
        self._looked = not graph.reentrant  # else inputs take gradients in each forward, as they do in the first one


# -- A module as a layer of a stage, in whose buffers its parameters lie -----------------------------------------------


def declared_by(module: Any) -> dict[str, Parameter]:
    """Return the parameters of a module by name, as a layer declares them: with the values that they have now."""
    check_module(module)
    return {name: _declared(each) for name, each in module.named_parameters()}


def _declared(parameter: Tensor) -> Parameter:
    def values(*_: Any) -> Any:
        wide = parameter.detach().to(torch.complex128 if parameter.is_complex() else torch.float64).cpu()
        return (torch.view_as_real(wide) if wide.is_complex() else wide).numpy()

    return Parameter(
        real_shape(parameter),
        values,
        decay=parameter.ndim > 1,
        tie=getattr(parameter, TIE, None),
        frozen=not parameter.requires_grad,
    )


def stage_on(module: Any, values: Mapping[str, Array], gradients: Mapping[str, Any], seed: int) -> TorchStage:
    """Return a stage of a module whose parameters are these arrays; one whose gradient is None is frozen."""
    named = dict(module.named_parameters())
    if named:
        like = tensor_of(next(iter(values.values())))
        _cast_buffers(module, like.dtype, like.device)
    for name, parameter in named.items():
        parameter.data = as_kind_of(parameter, tensor_of(values[name]))
        parameter.requires_grad_(gradients[name] is not None)
    return TorchStage(module, "", seed, storage=(values, gradients))


def _cast_buffers(module: Any, dtype: Any, device: Any) -> None:
    """Move the buffers to a device; those that have the dtype of the parameters go on to have it.

    Others stay as they are: a table of angles is complex, a clock in seconds needs all of its digits.
    """
    before = {real_dtype(each) for each in module.parameters()}
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is None:
                continue
            narrows = buffer.is_floating_point() and buffer.dtype.itemsize > dtype.itemsize
            own = not narrows or any(True for _ in part.parameters(recurse=False))
            if is_differentiable(buffer) and real_dtype(buffer) in before and own:
                kind = dtype.to_complex() if buffer.is_complex() else dtype
                part._buffers[key] = buffer.to(device, kind).contiguous()
            else:
                part._buffers[key] = buffer.to(device).contiguous()


def counted(stage: TorchStage, x: Tree, position: Position) -> tuple[Any, dict[int, int]]:
    """Return what the forward returns, and what PyTorch keeps for its backward: bytes by the address of the memory."""
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        held[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = stage.forward(x, position)
    for tensor in () if found[1] is None else chain(*found[1].kept[:2]):
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


# -- The backward of a module ------------------------------------------------------------------------------------------


def taking_part(slopes: list[Array | None], saved: Tape) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the inputs that take gradients, the outputs that gradients flow back from, and those gradients."""
    inputs, outputs, _ = saved.kept
    pairs = [(output, tensor_of(slope)) for output, slope in zip(outputs, slopes) if slope is not None]
    return inputs, [output for output, _ in pairs], [slope for _, slope in pairs]


def input_gradients(inputs: Sequence[Tensor]) -> list[Array]:
    """Return the gradients of inputs as arrays: zeros for an input that no output depends on."""
    found = []
    for each in inputs:
        gradient, each.grad = each.grad, None
        if gradient is None:
            gradient = torch.zeros_like(each, memory_format=torch.contiguous_format)
        found.append(array_of(gradient))
    return found
