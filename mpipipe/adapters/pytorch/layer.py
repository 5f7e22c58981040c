"""A module of PyTorch as a layer, and as a stage of its own.

    buffers of the stage | weight            | bias   |     of numpy or CuPy: optimizers, norms, sums over replicas
    parameters           |  .data of weight  | of bias|     of PyTorch: the module, torch.optim

Both are one memory, and so are the gradients. A parameter stays the object that it was, so that an
optimizer of PyTorch may have it already. A complex parameter lies there as pairs of real numbers,
with an axis of 2 more. What PyTorch calls "no gradient" (`zero_grad()` sets `.grad` to None) is a
gradient of zeros here: a call of a pipeline finds it so, and finds `.grad` on its memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple

import torch

from mpipipe import arrays
from mpipipe.adapters.foreign import (
    ForeignLayer,
    ForeignStage,
    Held,
    Leaves,
    Structures,
    Tape,
    applied,
    flatten_parts,
    one_dtype,
    returned,
    unflatten_parts,
)
from mpipipe.adapters.pytorch.attend import TorchAttend
from mpipipe.adapters.pytorch.backward import HOOKS, AutogradGraph, SplitBackward, register_hook
from mpipipe.adapters.pytorch.loss import TorchLoss
from mpipipe.adapters.pytorch.state import ModuleState
from mpipipe.adapters.pytorch.tensors import (
    Tensor,
    as_kind_of,
    check_module,
    device_of,
    flatten_output,
    is_differentiable,
    modules_for_hooks,
    move_state,
    on_stream,
    own_dtypes,
    real_dtype,
    real_shape,
    slope_of,
    written_error,
)
from mpipipe.adapters.pytorch.ties import SHARED, TIE
from mpipipe.arrays import Array, array_of, tensor_of
from mpipipe.errors import ArgumentError
from mpipipe.nn import Parameter, Position

# Seconds at least: a poll and its hook in the backward take up to 60 us where caches are cold.
BETWEEN_POLLS = 1e-3


class PlacedParameter(NamedTuple):
    """A parameter of a module in the buffers of a stage; `gradient` is what its `.grad` is, None
    where it is frozen.
    """

    parameter: Tensor
    address: int  # of its memory
    gradient: Tensor | None


class TorchLayer(ForeignLayer):
    """A module of PyTorch as a layer.

    Messages move after modules within that have matrices, every millisecond at most, and while a
    `TorchAttend` within computes.
    """

    ends = False
    freezes_parts = True
    mixes_positions = ForeignLayer.mixes_positions
    _pieces: dict[str, PlacedParameter]
    _polled = 0.0  # seconds of a clock
    in_one_walk = False  # whether the first half of the last backward has done all
    _looked = (
        False  # whether a graph has been looked at for tensors whose gradients are summed nowhere
    )

    def _declare(self) -> dict[str, Parameter]:
        check_module(self.given)
        self._pieces, own = {}, own_dtypes(self.given)
        return {
            name: _declared(each)
            for name, each in self.given.named_parameters()
            if each.requires_grad or real_dtype(each) in own
        }

    def bound(self) -> None:
        if self._pieces:  # a tied parameter shares the storage of another place
            self._follow_ties()
            return
        super().bound()
        module = self.given
        self._gpu = arrays.current_gpu() if self.stage.device == "cuda" else None
        device = "cpu" if self._gpu is None else f"cuda:{self._gpu}"
        values = [tensor_of(getattr(self, name)) for name in self.declared]
        shared = [name for name, each in module.named_buffers() if hasattr(each, SHARED)]
        move_state(module, {*self.declared}, values[0].dtype if values else None, device)
        for (name, parameter), value in zip(self._declared_ones(), values):
            before = parameter.grad
            parameter.grad = None
            parameter.data = as_kind_of(parameter, value)
            self._place(name, parameter)
            gradient = self._pieces[name].gradient
            if before is not None and gradient is not None:
                gradient.copy_(before)
        self._parameters = [
            each.parameter for each in self._pieces.values() if each.gradient is not None
        ]
        self._trained = {name for name, each in self._pieces.items() if each.gradient is not None}
        self._state = ModuleState(module)
        self._shared = {
            name: each.clone() for name, each in module.named_buffers() if name in shared
        }
        for each in modules_for_hooks(module):
            each.register_forward_hook(lambda _module, _inputs, output: self._move_messages(output))
        for each in module.modules():
            if isinstance(each, TorchAttend):
                each.attend.poll = self.poll

    def _declared_ones(self) -> list[tuple[str, Tensor]]:
        named = dict(self.given.named_parameters())
        return [(name, named[name]) for name in self.declared]

    # -- where parameters and gradients lie

    def _place(self, name: str, parameter: Tensor) -> None:
        """Let a parameter and its gradient lie where the stage has them."""
        gradient = getattr(self, f"{name}_grad")
        slope = None if gradient is None else as_kind_of(parameter, tensor_of(gradient))
        parameter.data = as_kind_of(parameter, tensor_of(getattr(self, name)))
        parameter.requires_grad_(slope is not None)
        parameter.grad = slope
        self._pieces[name] = PlacedParameter(parameter, parameter.data_ptr(), slope)

    def _follow_ties(self) -> None:
        """Compute with the arrays that a pipeline has given to tied parameters and their
        gradients.
        """
        for name in self._tied:
            parameter, address, slope = self._pieces[name]
            gradient = getattr(self, f"{name}_grad")
            moved = slope is not None and arrays.address(gradient) != slope.data_ptr()
            if moved or arrays.address(getattr(self, name)) != address:
                self._place(name, parameter)

    def begin_call(self) -> None:
        """Let each `.grad` be where the stage has it; one that was replaced is copied there, and
        None is zero.
        """
        if not self._pieces:
            return
        self._follow_ties()
        self._check_parameters()
        for parameter, _, gradient in self._pieces.values():
            found = parameter.grad
            if gradient is None or found is gradient:
                continue
            with torch.no_grad():
                gradient.zero_() if found is None else gradient.copy_(found)
            parameter.grad = gradient
        for name, before in self._shared.items():
            if not torch.equal(self.given.get_buffer(name), before):
                raise ArgumentError(
                    "a buffer that several entries share has changed: on several ranks each has "
                    "one of its own",
                    found=f"layer {self.name}, {name}",
                    expected="a table that stays as it is",
                    remedy="a buffer for each entry, or one entry with all modules that change it",
                )

    def _check_parameters(self) -> None:
        """Raise ArgumentError where parameters are no longer those of the stage, or lie
        elsewhere.
        """
        now = dict(self.given.named_parameters())
        changed = {name for name, each in now.items() if each.requires_grad} ^ self._trained
        changed |= {
            name for name, each in self._pieces.items() if now.get(name) is not each.parameter
        }
        if changed:
            raise ArgumentError(
                f"the parameter {min(changed)} of a module has been replaced or frozen since the "
                "stage was made, or is "
                "new, or no longer frozen",
                expected="the trainable parameters that there were then",
                remedy="load_state_dict without assign=True; freeze parameters first and make the "
                "stage then",
            )
        for name, (parameter, address, _) in self._pieces.items():
            if parameter.data_ptr() != address:
                raise ArgumentError(
                    f"the parameter {name} of a module lies elsewhere than in the stage's flat "
                    "array",
                    found=f"{parameter.dtype} on {parameter.device}",
                    expected="the memory, dtype and device that it had when the stage was made",
                    remedy="move and convert the module first (module.to, .double(), ...), and "
                    "make the stage then",
                )

    def _check_gradients(self) -> None:
        """Raise ArgumentError if a gradient has been replaced within a step: its sum would miss
        what comes now.
        """
        for name, (parameter, _, gradient) in self._pieces.items():
            found = parameter.grad
            if found is not gradient:
                raise ArgumentError(
                    f"the gradient of the parameter {name} was replaced within a step",
                    found="None"
                    if found is None
                    else f"another tensor, {found.dtype}{list(found.shape)}",
                    expected="gradients that nobody but the pipeline writes within a step",
                    remedy="call zero_grad() between steps, not in forward or in a loss",
                )

    @property
    def state(self) -> dict[str, Array]:
        """Persistent buffers, and parameters that no stage can have, by the module's names: views
        where they can be.
        """
        entries = self.given.state_dict()
        for name, _ in self.given.named_parameters(remove_duplicate=False):
            if name in self.declared or name not in dict(self.given.named_parameters()):
                entries.pop(name, None)
        return {name: array_of(_stored(name, each)) for name, each in entries.items()}

    # -- forward and backward

    def _computing(self) -> AbstractContextManager[Any]:
        return on_stream(self.stage.device)

    def _forward(
        self, leaves: Leaves, structures: Structures, position: Position
    ) -> tuple[Leaves, Structures, Tape | None]:
        trains = position.training
        hooks = HOOKS.value
        with (
            self._state.drawing(self._gpu, self.random_seed("torch"), position),
            torch.set_grad_enabled(trains),
        ):
            inputs = [tensor_of(leaf) for leaf in leaves]
            # the first time, too, where nobody asks: what refuses to be differentiated in part
            # raises its error then
            if trains and not (self.ends and self._looked):
                for each in inputs:
                    if is_differentiable(each):
                        each.requires_grad_()
            # The memory of inputs belongs to another stage or to the user, and a module may write
            # to copies.
            copies = [each.clone() for each in inputs]
            output = applied(self.given, (), unflatten_parts(copies, structures))
            outputs, shapes = flatten_parts(returned(output, self.gives), flatten_output)
            found = [array_of(each) for each in outputs]
        if not trains:
            return found, shapes, None
        floating, differentiable = (
            tuple(each.requires_grad for each in some) for some in (inputs, outputs)
        )
        taking, giving = (
            [each for each in some if each.requires_grad] for some in (inputs, outputs)
        )
        if not self._looked:
            self._look(taking, giving)
        kept = taking, giving, HOOKS.value > hooks
        return found, shapes, Tape(kept, structures, floating, shapes, differentiable)

    def _counted(self, leaves: Leaves, structures: Structures, position: Position) -> Any:
        """Return what `_forward` does, and what PyTorch keeps for the backward: bytes by the
        address of the memory.
        """
        held: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            held[memory.data_ptr()] = memory.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            found = self._forward(leaves, structures, position)
        inputs, outputs, _ = ((), (), False) if found[2] is None else found[2].kept
        for tensor in (*inputs, *outputs):
            note(tensor)
        for each in self._pieces.values():
            held.pop(each.address, None)
        return found, held

    def _backward(self, slopes: Leaves, tape: Tape) -> Leaves:
        inputs, outputs, gradients = self._taking_part(slopes, tape)
        if outputs:
            _unwritten(gradients, lambda: torch.autograd.backward(outputs, gradients))
        return [slope_of(each) for each in inputs]

    def _backward_input(self, slopes: Leaves, tape: Tape) -> tuple[Leaves, SplitBackward | None]:
        inputs, outputs, gradients = self._taking_part(slopes, tape)
        split = None
        if outputs:
            own = self._parameters
            hooked = tape.kept[2]
            split = _unwritten(
                gradients, lambda: SplitBackward(outputs, gradients, inputs, own, hooked)
            )
            self.in_one_walk = bool(own) and not split.parts
        return [slope_of(each) for each in inputs], split

    def _backward_weight(self, pending: SplitBackward | None) -> None:
        self._check_gradients()
        if pending is not None:
            pending.finish()

    def _taking_part(
        self, slopes: Leaves, tape: Tape
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the inputs that take gradients, the outputs that gradients flow back from, and
        those gradients.
        """
        self._check_gradients()
        inputs, outputs, _ = tape.kept
        pairs = [
            (output, tensor_of(slope))
            for output, slope in zip(outputs, slopes)
            if slope is not None
        ]
        return inputs, [output for output, _ in pairs], [slope for _, slope in pairs]

    def _move_messages(self, output: Any) -> None:
        """Poll when a module has ended its forward, and when it begins its backward; but not all
        the time.
        """
        if self.stage.poll is not None and perf_counter() > self._polled + BETWEEN_POLLS:
            self._polled = perf_counter()
            self.stage.poll()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                register_hook(output, lambda _gradient: self.poll())

    def _look(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Raise ArgumentError if the output depends on a tensor whose gradient is summed and used
        nowhere.
        """
        graph = AutogradGraph(outputs, inputs, self._parameters)
        if graph.strange:
            raise ArgumentError(
                "the output of a module depends on a tensor with a gradient that is none of its "
                "parameters",
                found=", ".join(f"{each.dtype}{list(each.shape)}" for each in graph.strange),
                expected="parameters that the module had when the stage was made",
                remedy="register it as torch.nn.Parameter before, or detach it",
            )
        self._looked = (
            not graph.reentrant
        )  # else inputs take gradients in each forward, as they do in the first one


class LossLayer(TorchLayer):
    """The parameters of a loss, in the buffers of a stage. Its output is its input."""

    ends = False
    freezes_parts = True
    mixes_positions = False

    def __init__(self, loss: TorchLoss, place: int | None = None) -> None:
        if loss.module is None:
            raise ArgumentError(
                "a loss without parameters in a list of layers",
                found=getattr(loss.function, "__name__", type(loss.function).__name__),
                expected="a torch.nn.Module with parameters",
                remedy="give it to the pipeline, or to the task, alone",
            )
        self.loss = loss
        super().__init__(loss.module, place=place)

    def bound(self) -> None:
        super().bound()
        self.loss.is_trained = True
        self.loss.seed = self.stage.seed

    def forward(self, x: Any) -> tuple[Any, Held]:
        return x, Held(None, {})

    def backward_input(self, dy: Any, saved: Held) -> tuple[Any, Held]:
        return dy, saved

    def backward_weight(self, pending: Held) -> None:
        """The loss has added to its gradients."""

    def backward(self, dy: Any, saved: Held) -> Any:
        return dy


class TorchStage(ForeignStage):
    """See `mpipipe.adapters.torch_stage`, which makes it."""

    def __init__(
        self,
        module: Any,
        prefix: str = "",
        seed: int = 0,
        gives: Sequence[str] = (),
        takes: Sequence[str] = (),
        ties: Any = None,
        loss: TorchLoss | None = None,
    ) -> None:
        self.module = module
        layers: dict[str, ForeignLayer] = {prefix: TorchLayer(module, gives, takes, ties)}
        tensors = [*module.parameters(), *module.buffers()]
        if loss is not None and loss.module is not None:
            layers[f"{prefix}loss."] = LossLayer(loss)
            tensors += [*loss.module.parameters(), *loss.module.buffers()]
        places = sorted({device_of(each) for each in tensors} or {"cpu"})
        if len(places) > 1:
            raise ArgumentError(
                "a module on several devices",
                found=", ".join(places),
                expected="one",
                remedy="module.to(device)",
            )
        kinds = {
            str(real_dtype(each)).removeprefix("torch."): name
            for name, each in module.named_parameters()
            if each.requires_grad
        }
        remedy = (
            "module.to(dtype); for mixed precision float32 parameters and torch.autocast "
            "within forward"
        )
        super().__init__(layers, one_dtype(kinds, remedy), seed, places[0])


def _declared(parameter: Tensor) -> Parameter:
    def values(*_: Any) -> Any:
        wide = (
            parameter.detach()
            .to(torch.complex128 if parameter.is_complex() else torch.float64)
            .cpu()
        )
        return (torch.view_as_real(wide) if wide.is_complex() else wide).numpy()

    return Parameter(
        real_shape(parameter),
        values,
        decay=parameter.ndim > 1,
        tie=getattr(parameter, TIE, None),
        frozen=not parameter.requires_grad,
    )


def _stored(name: str, value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"the state of a module is no tensor: {name}",
            found=type(value).__name__,
            expected="tensors alone: nothing else is written to checkpoints",
            remedy="leave out get_extra_state, and keep such facts in the state of the checkpoint",
        )
    return value


def _unwritten(gradients: Sequence[Tensor], walk: Callable[[], Any]) -> Any:
    """Raise ArgumentError if a backward writes to the gradients that it is given."""
    versions = [each._version for each in gradients]
    found = walk()
    if versions != [each._version for each in gradients]:
        raise written_error("the backward of a module", "the gradient that it is given")
    return found
