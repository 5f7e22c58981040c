"""A module of PyTorch as a layer, and as a stage of its own.

    buffers of the stage  | weight          | bias    |   numpy or CuPy: optimizers, norms, sums
    parameters            | .data of weight | of bias |   PyTorch: the module, torch.optim

Both are one memory, and so are the gradients. A parameter stays the object that it was, so that an
optimizer of PyTorch may have it already. A complex parameter lies there as pairs of real numbers,
with an axis of 2 more. What PyTorch calls "no gradient" (`zero_grad()` sets `.grad` to None) is a
gradient of zeros here: a call of a pipeline finds it so, and finds `.grad` on its memory again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from time import perf_counter
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from mpipipe import arrays
from mpipipe.adapters.foreign import (
    THREAD,
    ForeignLayer,
    ForeignStage,
    Leaves,
    Structures,
    Tape,
    WithSkips,
    applied,
    flatten_parts,
    floating_of,
    returned,
)
from mpipipe.adapters.pytorch.attend import TorchAttend
from mpipipe.adapters.pytorch.backward import (
    AutogradGraph,
    Walk,
    begin_backward,
    finish_backward,
    register_hook,
)
from mpipipe.adapters.pytorch.loss import TorchLoss
from mpipipe.adapters.pytorch.state import ModuleState
from mpipipe.adapters.pytorch.tensors import (
    NOTHING,
    Tensor,
    as_kind_of,
    checked_devices,
    described,
    flatten_output,
    modules_for_hooks,
    on_stream,
    reals_of,
    slope_of,
)
from mpipipe.adapters.pytorch.ties import SHARED, TIE
from mpipipe.arrays import Array, Tree, array_of, tensor_of
from mpipipe.errors import ArgumentError
from mpipipe.nn import FlatBuffer, Layer, Parameter, Saved

# Seconds at least: a poll and its hook in the backward take up to 60 us where caches are cold.
BETWEEN_POLLS = 1e-3


class PlacedParameter(NamedTuple):
    """A parameter in the buffers of a stage, and its `.grad`, None where it is frozen."""

    parameter: Tensor
    address: int
    gradient: Tensor | None


class TorchLayer(ForeignLayer):
    """A module of PyTorch as a layer.

    Messages move after modules within that have matrices, every millisecond at most, and while a
    `TorchAttend` within computes.
    """

    ends = False
    mixes_positions = True
    cast_remedy = (
        "module.to(dtype); for mixed precision float32 parameters and torch.autocast within forward"
    )
    _pieces: dict[str, PlacedParameter]
    # Seconds of a clock.
    _polled = 0.0
    # True if the first half of the last backward has done all.
    in_one_walk = False
    # True once a graph has been looked at for tensors whose gradients are summed nowhere.
    _looked = False

    def _declare(self) -> dict[str, Parameter]:
        self.devices = checked_devices(self.entry)
        self._pieces = {}
        self._shared: dict[str, Tensor] = {}
        trained = {}
        for name, parameter in self.entry.named_parameters():
            if parameter.requires_grad:
                trained[parameter.dtype.to_real()] = name
        self.dtypes = {str(kind).removeprefix("torch."): name for kind, name in trained.items()}
        # What is frozen in another dtype, such as integers of a quantized model, stays as it is.
        self._own = trained.keys() or {torch.float32, torch.float64}
        declared = {}
        for name, parameter in self.entry.named_parameters():
            if parameter.dtype.to_real() in self._own:
                declared[name] = _declared(parameter)
        return declared

    def bound(self) -> None:
        # A tied parameter shares the storage of another place.
        if self._pieces:
            for name in self._tied:
                self._place(name, self._pieces[name].parameter)
            return
        super().bound()
        device = self.stage.device
        if device == "cuda":
            device = f"cuda:{arrays.current_gpu()}"
        module = self.entry
        self._move_buffers(device)
        self._parameters = []
        for name, parameter in module.named_parameters():
            if name not in self.declared:
                parameter.data = parameter.data.to(device)
                continue
            before = parameter.grad
            self._place(name, parameter)
            if parameter.requires_grad:
                self._parameters.append(parameter)
                if before is not None:
                    parameter.grad.copy_(before)
        self._state = ModuleState(module)
        for part in modules_for_hooks(module):
            # No bound method: a copy of the module would copy the stage.
            part.register_forward_hook(lambda _module, _inputs, output: self._move_messages(output))
        for part in module.modules():
            if isinstance(part, TorchAttend):
                part.attend.poll = self.poll

    # -- where parameters, gradients and buffers lie

    def _move_buffers(self, device: str) -> None:
        """Move buffers to the device; they keep to the dtype of the parameters.

        Those of other dtypes than the parameters had stay as they are: a table of angles is
        complex, a clock in seconds needs all of its digits.
        """
        dtype = getattr(torch, self.stage.dtype.name)
        for name, part in self.entry.named_modules():
            for key, buffer in part._buffers.items():
                if buffer is None:
                    continue
                kind = buffer.dtype
                if self.declared and kind.to_real() in self._own:
                    narrows = buffer.is_floating_point() and kind.itemsize > dtype.itemsize
                    if not narrows or [*part.parameters(recurse=False)]:
                        kind = dtype.to_complex() if buffer.is_complex() else dtype
                moved = buffer.to(device, kind).contiguous()
                part._buffers[key] = moved
                if hasattr(buffer, SHARED):
                    self._shared[f"{name}.{key}".lstrip(".")] = moved.clone()

    def _place(self, name: str, parameter: Tensor) -> None:
        """Let a parameter and its gradient lie where the stage has them."""
        gradient = getattr(self, f"{name}_grad")
        parameter.data = as_kind_of(parameter, getattr(self, name))
        parameter.requires_grad_(gradient is not None)
        parameter.grad = None if gradient is None else as_kind_of(parameter, gradient)
        self._pieces[name] = PlacedParameter(parameter, parameter.data_ptr(), parameter.grad)

    def _follow_ties(self) -> None:
        """Add to the gradients that a pipeline has given to tied parameters."""
        for name in self._tied:
            parameter, _, slope = self._pieces[name]
            gradient = getattr(self, f"{name}_grad")
            if slope is not None and arrays.address(gradient) != slope.data_ptr():
                self._place(name, parameter)

    def begin_call(self) -> None:
        """Let each `.grad` be where the stage has it: another one is copied there, None is zero."""
        # Without any, it may not be bound yet.
        if self._pieces:
            self._follow_ties()
            self._check_parameters()
        for parameter, _, gradient in self._pieces.values():
            other = parameter.grad
            if gradient is not None and other is not gradient:
                with torch.no_grad():
                    gradient[...] = 0 if other is None else other
                parameter.grad = gradient
        for name, before in self._shared.items():
            if not torch.equal(self.entry.get_buffer(name), before):
                raise ArgumentError(
                    "a buffer that several entries share has changed: on several ranks each has "
                    "one of its own",
                    found=f"layer {self.name}, {name}",
                    expected="a table that stays as it is",
                    remedy="a buffer for each entry, or one entry with all modules that change it",
                )

    def _check_parameters(self) -> None:
        """Raise ArgumentError for parameters that are not those of the stage, or lie elsewhere."""
        now = dict(self.entry.named_parameters())
        changed = self._pieces.keys() - now.keys()
        for name, parameter in now.items():
            own, address, gradient = self._pieces.get(name, (parameter, None, None))
            if own is not parameter or parameter.requires_grad != (gradient is not None):
                changed.add(name)
            elif address not in (None, parameter.data_ptr()):
                raise ArgumentError(
                    f"the parameter {name} of a module lies elsewhere than in the stage's flat "
                    "array",
                    found=f"{parameter.dtype} on {parameter.device}",
                    expected="the memory, dtype and device that it had when the stage was made",
                    remedy="move and convert the module first (module.to, .double(), ...), and "
                    "make the stage then",
                )
        if changed:
            raise ArgumentError(
                f"the parameter {min(changed)} of a module has been replaced or frozen since the "
                "stage was made, or is new, or no longer frozen",
                expected="the trainable parameters that there were then",
                remedy="load_state_dict without assign=True; freeze parameters first and make the "
                "stage then",
            )

    def _check_gradients(self) -> None:
        """Raise ArgumentError if a gradient was replaced within a step: its sum would be lost."""
        self._follow_ties()
        for name, (parameter, _, gradient) in self._pieces.items():
            other = parameter.grad
            if other is not gradient:
                raise ArgumentError(
                    f"the gradient of the parameter {name} was replaced within a step",
                    found="None" if other is None else described([other]),
                    expected="gradients that only the pipeline writes within a step",
                    remedy="call zero_grad() between steps, not in forward or in a loss",
                )

    @property
    def state(self) -> dict[str, Array]:  # type: ignore[override]
        """Persistent buffers, and parameters that no stage can have, by the module's names."""
        parameters = self.entry.named_parameters
        # A parameter may have a second name.
        second = dict(parameters(remove_duplicate=False)).keys() - dict(parameters()).keys()
        state = {}
        for name, value in self.entry.state_dict().items():
            if name in self.declared or name in second:
                continue
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"the state of a module is no tensor: {name}",
                    found=type(value).__name__,
                    expected="tensors alone: nothing else is written to checkpoints",
                    remedy="leave out get_extra_state, and keep such facts in the state of the "
                    "checkpoint",
                )
            state[name] = array_of(value)
        return state

    # -- forward and backward

    def _forward(self, leaves: Leaves, structures: Structures) -> tuple[Leaves, Tape]:
        position = self.stage.position
        trains = position.training
        hooks = THREAD.hooks
        sizes = KeptMemory()
        with (
            on_stream(self.stage.device),
            self._state.drawing(self.stage.device, self.random_seed("torch"), position),
            torch.set_grad_enabled(trains),
            saved_tensors_hooks(sizes.note, lambda tensor: tensor) if THREAD.counts else NOTHING,
        ):
            inputs = list(map(tensor_of, leaves))
            # The first time also where they are not needed: what refuses to be differentiated in
            # part raises its error then.
            if trains and not (self.ends and self._looked):
                for tensor in compress(inputs, floating_of(leaves)):
                    tensor.requires_grad_()
            # The memory of inputs belongs to another stage or to the user, and a module may write
            # to copies.
            copies = [tensor.clone() for tensor in inputs]
            output = applied(self.entry, copies, structures)
            outputs, shapes = flatten_parts(returned(output, self.gives), flatten_output)
            results = list(map(array_of, outputs))
        floating = tuple(tensor.requires_grad for tensor in inputs)
        differentiable = tuple(tensor.requires_grad for tensor in outputs)
        taking = list(compress(inputs, floating))
        giving = list(compress(outputs, differentiable))
        if trains and not self._looked:
            self._look(taking, giving)
        for tensor in (*taking, *giving):
            sizes.note(tensor)
        graph = taking, giving, THREAD.hooks > hooks
        return results, Tape(graph, structures, floating, shapes, differentiable, sizes)

    def _backward(self, slopes: Leaves, tape: Tape, whole: bool) -> tuple[Leaves, list[Walk]]:
        self._check_gradients()
        inputs, giving, hooked = tape.of_library
        outputs = []
        gradients = []
        walks: list[Walk] = []
        with on_stream(self.stage.device):
            for output, slope in zip(giving, slopes):
                if slope is not None:
                    outputs.append(output)
                    gradients.append(tensor_of(slope))
            if outputs and (whole or hooked or not self._parameters):
                torch.autograd.backward(outputs, gradients)
            elif outputs:
                walks = begin_backward(outputs, gradients, inputs, self._parameters)
            results = list(map(slope_of, inputs))
        if any(gradient._version for gradient in gradients):
            raise ArgumentError(
                "the backward of a module writes to the gradient that it is given in place",
                expected="arrays that stay as they are: the memory belongs to another stage, "
                "or to you",
                remedy="inplace=False in the first layer, x = x + 1 in place of x += 1, or "
                "x = x.clone() first",
            )
        if outputs and not whole:
            self.in_one_walk = bool(self._parameters) and not walks
        return results, walks

    def backward_weight(self, pending: Tape) -> None:
        self._check_gradients()
        with on_stream(self.stage.device):
            finish_backward(pending.of_library)

    def backward(self, dy: Tree, saved: Tape) -> Tree:
        return self.backward_input(dy, saved, whole=True)[0]

    def _move_messages(self, output: object) -> None:
        """Poll after the forward of a module, and before its backward; but not all the time."""
        if perf_counter() > self._polled + BETWEEN_POLLS:
            self._polled = perf_counter()
            self.poll()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                register_hook(output, lambda _gradient: self.poll())

    def _look(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Raise ArgumentError if the output depends on a tensor whose gradient is lost."""
        graph = AutogradGraph(outputs, inputs, self._parameters)
        if graph.strange:
            raise ArgumentError(
                "the output of a module depends on a tensor with a gradient that is none of its "
                "parameters",
                found=described(graph.strange),
                expected="parameters that the module had when the stage was made",
                remedy="register it as torch.nn.Parameter before, or detach it",
            )
        # Else inputs take gradients in each forward, as they do in the first one.
        self._looked = not graph.reentrant


class KeptMemory(dict[int, int]):
    """Bytes of memory by its address."""

    def note(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        self[memory.data_ptr()] = memory.nbytes()
        return tensor


class LossLayer(TorchLayer):
    """The parameters of a loss, in the buffers of a stage. Its output is its input."""

    ends = False
    mixes_positions = False

    def __init__(self, loss: TorchLoss, place: int | None = None) -> None:
        if not loss.is_module:
            raise ArgumentError(
                "a loss without parameters in a list of layers",
                found=getattr(loss.function, "__name__", type(loss.function).__name__),
                expected="a torch.nn.Module with parameters",
                remedy="give it to the pipeline, or to the task, alone",
            )
        self.loss = loss
        super().__init__(WithSkips(loss.module), place)

    def bound(self) -> None:
        super().bound()
        self.loss.is_trained = True
        self.loss.seed = self.stage.seed

    def forward(self, x: Tree) -> tuple[Tree, Saved]:
        return x, None

    def backward_input(self, dy: Tree, saved: object, whole: bool = False) -> tuple[Tree, Saved]:
        return dy, None

    # The loss itself adds to its gradients.
    backward_weight = Layer.backward_weight


class TorchStage(ForeignStage):
    """See `mpipipe.adapters.torch_stage`, which makes it."""

    @property
    def module(self) -> torch.nn.Module:
        """The module that it computes."""
        return self.layer.entry

    @property
    def gradients(self) -> FlatBuffer:
        """The gradients, with what PyTorch has put in their place since."""
        for layer in self.layers:
            layer.begin_call()
        return super().gradients


def _declared(parameter: Tensor) -> Parameter:
    return Parameter(
        tuple(reals_of(parameter).shape),
        lambda *_: reals_of(parameter).double().numpy(force=True),
        decay=parameter.ndim > 1,
        tie=getattr(parameter, TIE, None),
        frozen=not parameter.requires_grad,
    )
