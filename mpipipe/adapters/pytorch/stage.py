"""A module of PyTorch as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpipipe import arrays
from mpipipe.adapters.pytorch.parameters import (
    TorchGradients,
    TorchParameters,
    TorchSaved,
    input_gradients,
    taking_part,
)
from mpipipe.adapters.pytorch.split import AutogradGraph, SplitBackward
from mpipipe.adapters.pytorch.tensors import (
    ModuleBuffers,
    Tensor,
    array_of,
    check_module,
    device_of,
    flatten_output,
    inputs_unchanged,
    is_differentiable,
    modules_for_hooks,
    on_stream,
    tensor_of,
    tensors_of,
)
from mpipipe.adapters.trees import applied, flatten_parts, parts_of, returned, skip_names, tree_of, unflatten_parts
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Branches, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position, random
from mpipipe.nn.parameters import FlatBuffer

BACKWARD = "the backward of a module", "the gradient that it is given"


class TorchStage:
    """See `mpipipe.adapters.torch_stage`, which makes it.

    Attributes
    ----------
    module : torch.nn.Module
        The module.
    parameters, gradients : mapping of str to array, or None
        Its trainable parameters and their gradients: views of one array `.flat` each, on the memory of the module's.
    device : str
        "cpu" or "cuda".
    gpu : int or None
        Number of the GPU.
    index : int or None
        Number of the stage, set by the pipeline.
    poll : callable or None
        Lets messages move; set by the pipeline, and called after each module within that has parameters.
    before_write : list of callable
        Called by optimizers of mpipipe before they write parameters.
    """

    takes_branches = False  # without names of skips: one tree in, one tree out

    def __init__(
        self, module: Any, prefix: str = "", seed: int = 0, gives: Sequence[str] = (), takes: Sequence[str] = ()
    ):
        check_module(module)
        self.gives, self.takes = skip_names(gives, "gives of torch_stage"), skip_names(takes, "takes of torch_stage")
        if self.gives or self.takes:
            self.takes_branches = True
        self.module, self.prefix, self.seed = module, prefix, seed
        self.index: int | None = None
        self.poll: Callable[[], object] | None = None
        self.before_write: list[Callable[[], object]] = []
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
            self._trained = TorchParameters(module, prefix, self.device)
        self._parameters = [piece.parameter for piece in self._trained.pieces]
        self._buffers = ModuleBuffers(module)
        self._looked = False  # whether a graph has been looked at for tensors that nobody would sum up
        for each in modules_for_hooks(module):
            each.register_forward_hook(self._move_messages)

    @property
    def parameters(self) -> FlatBuffer | None:
        """The trainable parameters, or None."""
        return self._trained.values

    @property
    def gradients(self) -> TorchGradients | None:
        """Their gradients, or None."""
        return self._trained.gradients

    def refresh(self) -> None:
        """Look whether the parameters are where they were. A pipeline does this at the start of each call."""
        self._trained.check()

    def forward(
        self, x: Tree | Branches, position: Position | None = None
    ) -> tuple[Tree | Branches, TorchSaved | None]:
        """Compute the output of one micro-batch, and in a training step what its backward needs.

        Parameters
        ----------
        x : array, tuple or dict of arrays, or Branches of them
            One argument of the module; several; or several by their names. Those over skips come after.
        position : Position, optional
            Where the training stands: it says whether this is a training, and which random numbers are drawn.

        Returns
        -------
        y : array, tuple or dict of arrays, or Branches of them
            What the module returned.
        saved : object
            What `backward` takes; None in an evaluation.
        """
        position = Position() if position is None else position
        with on_stream(self.device), self._random(position), torch.set_grad_enabled(position.training):
            if self.module.training != position.training:
                self.module.train(position.training)
            leaves, structures = flatten_parts(parts_of(x, self.takes))
            inputs = [tensor_of(leaf) for leaf in leaves]
            for each in inputs:
                each.requires_grad_(position.training and is_differentiable(each))
            with inputs_unchanged(inputs), self._buffers.unchanged():
                output = applied(self.module, (), unflatten_parts(inputs, structures))
                outputs, shapes = flatten_parts(returned(output, self.gives), flatten_output)
            y = tree_of(unflatten_parts([array_of(each) for each in outputs], shapes), self.gives)
        if not position.training:
            return y, None
        saved = TorchSaved(inputs, structures, outputs, shapes)
        if not self._looked:
            self._look(saved)
        return y, saved

    def backward(self, dy: Tree | Branches, saved: TorchSaved) -> Tree | Branches:
        """Add to the gradients of the parameters, and return the gradient of the input.

        Parameters
        ----------
        dy : array, tuple or dict of arrays, or Branches of them
            Gradient of the output, None for integers in it.
        saved : object
            What `forward` saved.

        Returns
        -------
        array, tuple or dict of arrays, or Branches of them
            Gradient of the input, None for integers in it.
        """
        with on_stream(self.device):
            self._trained.check_gradients()
            outputs, gradients = taking_part(saved, dy, self.gives)
            inputs = saved.differentiable
            if outputs:
                with inputs_unchanged(gradients, *BACKWARD):
                    torch.autograd.backward(outputs, gradients, inputs=[*inputs, *self._parameters])
            return input_gradients(saved, [each.grad for each in inputs], self.takes)

    def backward_input(self, dy: Tree | Branches, saved: TorchSaved) -> tuple[Tree | Branches, SplitBackward | None]:
        """Return the gradient of the input, and what `backward_weight` needs.

        Parameters
        ----------
        dy : array, tuple or dict of arrays, or Branches of them
            Gradient of the output.
        saved : object
            What `forward` saved.

        Returns
        -------
        dx : array, tuple or dict of arrays, or Branches of them
            Gradient of the input.
        pending : object
            What `backward_weight` takes.
        """
        with on_stream(self.device):
            outputs, gradients = taking_part(saved, dy, self.gives)
            if not outputs:
                return input_gradients(saved, [None for _ in saved.differentiable], self.takes), None
            with inputs_unchanged(gradients, *BACKWARD):
                split = SplitBackward(outputs, gradients, saved.differentiable, self._parameters)
            return input_gradients(saved, split.input_gradients, self.takes), split

    def backward_weight(self, pending: SplitBackward | None) -> None:
        """Add to the gradients of the parameters.

        Parameters
        ----------
        pending : object
            What `backward_input` returned.
        """
        with on_stream(self.device):
            self._trained.check_gradients()
            if pending is not None:
                pending.finish(self._parameters)

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and persistent buffers by the module's names, behind the prefix: views where they can be.

        Returns
        -------
        dict of str to array
            As the module's own `state_dict`, frozen parameters included.
        """
        return {
            f"{self.prefix}{name}": array_of(_stored(name, each)) for name, each in self.module.state_dict().items()
        }

    def load_state_dict(self, values: Mapping[str, Array]) -> None:
        """Set parameters and buffers.

        Parameters
        ----------
        values : mapping of str to array
            What `state_dict` gave, with other values.
        """
        for function in tuple(self.before_write):
            function()
        found = {name.removeprefix(self.prefix): tensor_of(array) for name, array in values.items()}
        self.module.load_state_dict(found)

    @contextmanager
    def _random(self, position: Position) -> Iterator[None]:
        """Draw the random numbers of this place within, whatever else is drawn before or at the same time."""
        generator = torch.default_generator if self.gpu is None else torch.cuda.default_generators[self.gpu]
        state = generator.get_state()
        names = "torch", self.seed, self.index, position.step, position.microbatch, position.replica
        generator.manual_seed(int(random.key(*names)[0]) >> 1)
        try:
            yield
        finally:
            generator.set_state(state)

    def _move_messages(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Poll when a module has ended its forward, and when it begins its backward."""
        if self.poll is not None:
            self.poll()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._poll_backward)

    def _poll_backward(self, _gradient: Tensor) -> None:
        if self.poll is not None:
            self.poll()

    def _look(self, saved: TorchSaved) -> None:
        """Raise ArgumentError if the output depends on a tensor whose gradient nobody would sum up or use."""
        outputs = [each for each in saved.outputs if each.requires_grad]
        strange = AutogradGraph(outputs, saved.differentiable, self._parameters).strange
        if strange:
            raise ArgumentError(
                "the output of a module depends on a tensor with a gradient that is none of its parameters",
                found=", ".join(f"{each.dtype}{list(each.shape)}" for each in strange),
                expected="parameters that the module had when the stage was made",
                remedy="register it as torch.nn.Parameter before, or detach it",
            )
        self._looked = True


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
            outputs, structure = tensors_of(output)
            taking = [each.requires_grad_() for each in outputs if is_differentiable(each)]
            targets, shape = tensors_of(target)
            with inputs_unchanged([*outputs, *targets], "a loss", "the output or the targets"):
                value = self.function(unflatten(outputs, structure), unflatten(targets, shape))
            found = torch.autograd.grad(value, taking, torch.full_like(value, factor), allow_unused=True)
            slopes = iter(torch.zeros_like(x) if slope is None else slope for x, slope in zip(taking, found))
            gradient = unflatten([array_of(next(slopes)) if x.requires_grad else None for x in outputs], structure)
            return value.item() if value.device.type == "cpu" else array_of(value), gradient
