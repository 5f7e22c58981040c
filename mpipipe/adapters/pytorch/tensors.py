"""What a stage asks of a module of PyTorch and of its tensors: devices, trees, buffers, and parameters as flat arrays.

On a GPU PyTorch works on CuPy's current stream, so all work is in one order. That follows the documentation of both
(PyTorch, "torch.cuda.ExternalStream"; CuPy, "Interoperability"). No test runs it: no emulated GPU is for PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from mpipipe import arrays
from mpipipe.adapters.trees import one_dtype
from mpipipe.arrays import Array, Structure, flatten, tensor_of
from mpipipe.errors import ArgumentError
from mpipipe.nn import FlatBuffer

Tensor: TypeAlias = Any  # torch.Tensor: PyTorch may be missing where types are checked


def is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients exist for tensors of this dtype."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def on_stream(device: str) -> AbstractContextManager[Any]:
    """Within, PyTorch works on CuPy's current stream; on the host this does nothing."""
    if device == "cpu":
        return nullcontext()
    pointer = arrays.stream().ptr
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream())


def device_of(tensor: Tensor) -> tuple[str, int | None]:
    """Return ("cpu", None) or ("cuda", number of the GPU); raises ArgumentError for other devices."""
    if tensor.device.type == "cpu":
        return "cpu", None
    if tensor.device.type != "cuda":
        raise ArgumentError("a module on a device that arrays do not know", found=tensor.device, expected="cpu or cuda")
    arrays.check_device(f"cuda:{tensor.device.index}")
    return "cuda", tensor.device.index


def flatten_output(output: Any) -> tuple[list[Tensor], Structure]:
    """Return (tensors, structure) of what a module returned; raises ArgumentError for anything else than a tree."""
    if isinstance(output, torch.Tensor):
        return [output], None
    values = output if isinstance(output, (tuple, dict)) else tuple(output) if isinstance(output, list) else ()
    leaves, structure = flatten(values)
    strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if strange or not leaves:
        raise ArgumentError(
            "the output of a module",
            found=f"{type(output).__name__} with {', '.join(strange) or 'nothing'} in it",
            expected="a tensor, or a tuple or dict of tensors",
            remedy="wrap the module in one whose forward returns tensors alone",
        )
    return leaves, structure


# -- Modules that cannot be a stage, and what a module must not do in its forward -------------------------------------


COMPILED = "OptimizedModule"  # what torch.compile makes


def check_module(module: Any) -> None:
    """Raise ArgumentError for what is no module, or has parameters without a shape."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError("torch_stage", found=type(module).__name__, expected="a torch.nn.Module")
    lazy = [name for name, each in module.named_parameters() if torch.nn.parameter.is_lazy(each)]
    if lazy:
        raise ArgumentError(
            "a module has parameters without a shape yet",
            found=lazy[0],
            remedy="run the module once before it becomes a stage",
        )


def modules_for_hooks(module: Any) -> Iterator[Any]:
    """Yield the modules within that have matrices and can have hooks: others take less time than a hook is worth.

    TorchScript takes none, and a graph of torch.compile would break at each.
    """
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == COMPILED:
        return
    if any(each.ndim > 1 for each in module.parameters(recurse=False)):
        yield module
    for each in module.children():
        yield from modules_for_hooks(each)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor._version)


@contextmanager
def inputs_unchanged(inputs: Sequence[Tensor], who: str = "a module", what: str = "its input") -> Iterator[None]:
    """Raise ArgumentError if one of the tensors is written to within: PyTorch knows no tensors that are read only."""
    versions = [_version(each) for each in inputs]
    try:
        yield
    except RuntimeError as error:
        if "in-place operation" in str(error) and "leaf" in str(error):
            raise _written(who, what) from error
        raise
    if versions != [_version(each) for each in inputs]:
        raise _written(who, what)


def _written(who: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"{who} writes to {what} in place",
        expected="arrays that stay as they are: the memory belongs to another stage, or to you",
        remedy="inplace=False in the first layer, x = x + 1 in place of x += 1, or x = x.clone() first",
    )


# -- The trainable parameters of a module as one flat array, and their gradients as another ---------------------------
#
#     flat array     | weight            | bias   |     of numpy or CuPy: optimizers, norms, sums over replicas
#     parameters     |  .data of weight  | of bias|     of PyTorch: the module, torch.optim
#
# Both are one memory. A parameter stays the object that it was, so that an optimizer of PyTorch may have it already.
# A complex parameter lies there as pairs of real numbers, with an axis of 2 more, so real ones may lie beside it.
# What PyTorch calls "no gradient" (`zero_grad()` sets `.grad` to None) is a gradient of zeros here: code that asks
# for the flat array of gradients finds it so, and finds `.grad` on its memory again.


REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # dtype of the parts


def real_dtype(tensor: Tensor) -> Any:
    """Return the dtype of the real numbers that a tensor consists of."""
    return REAL.get(tensor.dtype, tensor.dtype)


def real_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in a flat array of real numbers."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def as_kind_of(tensor: Tensor, real: Tensor) -> Tensor:
    """Return an array of real numbers as complex ones, where the tensor that it stands for is complex."""
    return torch.view_as_complex(real) if tensor.is_complex() and not real.is_complex() else real


def _dtype(tensor: Tensor) -> Any:
    return tensor.dtype


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


class TrainedParameter(NamedTuple):
    """One trainable parameter; `owner` is the module that has it as `key`."""

    name: str
    owner: Any
    key: str
    parameter: Tensor
    address: int  # of its memory
    gradient: Tensor  # what its `.grad` is, on the flat array of gradients


class TorchParameters:
    """The trainable parameters of modules, moved into one flat array `values`; None if nothing is trained.

    `modules` are by prefixes of names. `storage` are values and gradients by name that lie in buffers of somebody else,
    and have the initial values.
    """

    def __init__(self, modules: Mapping[str, Any], device: str, storage: tuple[Mapping, Mapping] | None = None):
        trained: dict[str, Tensor] = {}
        owners: dict[str, tuple[Any, str]] = {}
        for prefix, module in modules.items():
            for name, each in module.named_parameters():
                if each.requires_grad and not any(each is other for other in trained.values()):
                    owner, _, key = name.rpartition(".")
                    owners[f"{prefix}{name}"] = module.get_submodule(owner), key
                    trained[f"{prefix}{name}"] = each
        self.values: FlatBuffer | None = None
        self.gradients: FlatBuffer | None = None
        self.pieces: list[TrainedParameter] = []
        if not trained:
            return
        # Real and complex ones together are all real ones, as in the buffers of an nn.Stage.
        alike = storage is None and len({each.dtype for each in trained.values()}) == 1
        kind_of, shape_of = (_dtype, _shape) if alike else (real_dtype, real_shape)
        if storage is None:
            kind = one_dtype(
                {str(kind_of(each)).removeprefix("torch."): name for name, each in trained.items()},
                "module",
                "module.to(dtype); for mixed precision float32 parameters and torch.autocast within forward",
            )
            shapes = {name: shape_of(each) for name, each in trained.items()}
            self.values, self.gradients = (FlatBuffer(shapes, kind, device) for _ in range(2))
        both: Any = (self.values, self.gradients) if storage is None else storage
        with torch.no_grad():
            for name, parameter in trained.items():
                value, gradient = (as_kind_of(parameter, tensor_of(each[name])) for each in both)
                if storage is None:
                    value.copy_(parameter)
                if storage is None and parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                parameter.data, parameter.grad = value, gradient
                self.pieces.append(TrainedParameter(name, *owners[name], parameter, value.data_ptr(), gradient))

    def place(self, name: str, value: Array, gradient: Array | None) -> None:
        """Let one parameter and its gradient lie in these arrays, whose values are there already."""
        for number, piece in enumerate(self.pieces):
            if piece.name == name and gradient is not None:
                moved = arrays.address(value) != piece.address
                if moved or arrays.address(gradient) != piece.gradient.data_ptr():
                    data, slope = (as_kind_of(piece.parameter, tensor_of(each)) for each in (value, gradient))
                    piece.parameter.data, piece.parameter.grad = data, slope
                    self.pieces[number] = piece._replace(address=data.data_ptr(), gradient=slope)

    def adopted_gradients(self) -> FlatBuffer | None:
        """Let each `.grad` be a view of the flat array; one that was replaced is copied there, and None is zero."""
        self.check()
        for piece in self.pieces:
            found = piece.parameter.grad
            if found is piece.gradient:
                continue
            with torch.no_grad():
                piece.gradient.zero_() if found is None else piece.gradient.copy_(found)
            piece.parameter.grad = piece.gradient
        return self.gradients

    def check(self) -> None:
        """Raise ArgumentError if a parameter is no longer in the flat array."""
        for name, owner, key, parameter, address, _ in self.pieces:
            if owner._parameters.get(key) is not parameter or not parameter.requires_grad:
                raise ArgumentError(
                    f"the parameter {name} of a module has been replaced or frozen since the stage was made",
                    expected="the trainable parameters that there were then",
                    remedy="load_state_dict without assign=True; freeze parameters first and make the stage then",
                )
            if parameter.data_ptr() != address:
                raise ArgumentError(
                    f"the parameter {name} of a module lies elsewhere than in the stage's flat array",
                    found=f"{parameter.dtype} on {parameter.device}",
                    expected="the memory, dtype and device that it had when the stage was made",
                    remedy="move and convert the module first (module.to, .double(), ...), and make the stage then",
                )

    def check_gradients(self) -> None:
        """Raise ArgumentError if a gradient has been replaced within a step: its sum would miss what comes now."""
        for piece in self.pieces:
            if piece.parameter.grad is not piece.gradient:
                found = piece.parameter.grad
                raise ArgumentError(
                    f"the gradient of the parameter {piece.name} was replaced within a step",
                    found="None" if found is None else f"another tensor, {found.dtype}{list(found.shape)}",
                    expected="gradients that nobody but the pipeline writes within a step",
                    remedy="call zero_grad() between steps, not in forward or in a loss",
                )
