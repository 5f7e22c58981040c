"""Modules of PyTorch and their tensors as a stage sees them: devices, trees, buffers, dtypes.

On a GPU PyTorch works on CuPy's current stream, so all work is in one order. That follows the
documentation of both (PyTorch, "torch.cuda.ExternalStream"; CuPy, "Interoperability"). No test runs
it: no emulated GPU is for PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

from mpipipe import arrays
from mpipipe.arrays import Array, Structure, array_of, flatten, tensor_of
from mpipipe.errors import ArgumentError

# torch.Tensor: PyTorch may be missing where types are checked.
Tensor: TypeAlias = Any
NOTHING = nullcontext()


def described(tensors: Iterable[Tensor]) -> str:
    """Return dtypes and shapes, for errors."""
    return ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)


def slope_of(tensor: Tensor) -> Array:
    """Take the gradient that has arrived at a tensor, as an array; zeros without one."""
    gradient = tensor.grad
    tensor.grad = None
    if gradient is None:
        gradient = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return array_of(gradient)


def on_stream(device: str) -> AbstractContextManager[object]:
    """Within, PyTorch works on CuPy's current stream; on the host this does nothing."""
    if device == "cpu":
        return NOTHING
    pointer = arrays.stream().ptr
    stream = torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream()
    return torch.cuda.stream(stream)


def flatten_output(output: object) -> tuple[list[Tensor], Structure]:
    """Return (tensors, structure) of an output. ArgumentError for anything else than a tree."""
    if isinstance(output, torch.Tensor):
        return [output], None
    tree: Any = ()
    if isinstance(output, dict):
        tree = output
    elif isinstance(output, (tuple, list)):
        tree = tuple(output)
    leaves, structure = flatten(tree)
    strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if strange or not leaves:
        raise ArgumentError(
            "the output of a module",
            found=f"{type(output).__name__} with {', '.join(strange) or 'nothing'} in it",
            expected="a tensor, or a tuple or dict of tensors",
            remedy="wrap the module in one whose forward returns tensors alone",
        )
    return leaves, structure


# -- Modules that cannot be a stage ----------------------------------------------------------------


# The class that torch.compile makes.
COMPILED = "OptimizedModule"


def checked_devices(module: torch.nn.Module) -> set[str]:
    """Return the devices of a module, such as "cpu" and "cuda:1".

    Raises ArgumentError for what is no module, or cannot be a stage.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "torch_stage", found=type(module).__name__, expected="a torch.nn.Module"
        )
    devices = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                "a module has parameters without a shape yet",
                found=name,
                remedy="run the module once before it becomes a stage",
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                "a module on a device that arrays do not know",
                found=tensor.device,
                expected="cpu or cuda",
                remedy="module.to('cpu'); of meta module.to_empty(device='cpu') and initial values",
            )
        devices.add(str(tensor.device))
    if any(isinstance(part, torch.nn.SyncBatchNorm) and part.training for part in module.modules()):
        raise ArgumentError(
            "a module has SyncBatchNorm",
            expected="statistics of a micro-batch: processes of torch.distributed are no replicas "
            "of a pipeline",
            remedy="torch.nn.BatchNorm1d, 2d or 3d; or module.eval() of that part, and no gradient",
        )
    return devices


def modules_for_hooks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules within that are worth a hook, since they have matrices.

    TorchScript takes none, and a graph of torch.compile would break at each.
    """
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == COMPILED:
        return
    for part in module.children():
        if any(parameter.ndim > 1 for parameter in part.parameters(recurse=False)):
            yield part
        yield from modules_for_hooks(part)


# -- Complex numbers as pairs of real ones ---------------------------------------------------------


def reals_of(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, on an axis more, and others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_kind_of(tensor: Tensor, reals: Array) -> Tensor:
    """Return a tensor on an array of reals: of complex numbers, where the first tensor has such."""
    values = tensor_of(reals)
    if tensor.is_complex():
        return torch.view_as_complex(values)
    return values
