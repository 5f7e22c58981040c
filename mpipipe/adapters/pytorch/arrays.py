"""Arrays as PyTorch's tensors and back, without a copy: both see one memory, on the host and on a GPU.

On the host that is numpy's own bridge. bfloat16, which numpy does not know, crosses as int16 of the same bits. On a GPU
it is DLPack between CuPy and PyTorch, and PyTorch works on CuPy's current stream, so all work is in one order. What is
for GPUs here follows the documentation of both (PyTorch, "torch.utils.dlpack" and "torch.cuda.ExternalStream"; CuPy,
"Interoperability", DLPack). It has never run: there is no emulated GPU for PyTorch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Structure, flatten
from mpipipe.errors import ArgumentError

Tensor: TypeAlias = Any  # torch.Tensor: PyTorch may be missing where types are checked
BFLOAT16 = arrays.dtype("bfloat16")
FLOATING = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
            torch.complex128: "complex128", torch.complex64: "complex64"}  # fmt: skip


def tensor_of(array: Array) -> Tensor:
    """Return a tensor on the memory of an array.

    Host memory that numpy may not write to (a map of a file, opened for reading) is copied: PyTorch knows no tensors
    that are read only, and a module that wrote to one would end the process.
    """
    bits = array.view(np.int16) if array.dtype == BFLOAT16 else array
    found = torch.from_dlpack(bits) if arrays.is_device(array) else torch.from_numpy(_writable(bits))
    return found.view(torch.bfloat16) if array.dtype == BFLOAT16 else found


def _writable(array: np.ndarray) -> np.ndarray:
    """The same memory, where whoever owns it may write to it; else a copy."""
    if array.flags.writeable:
        return array
    view = array.view()
    try:
        view.flags.writeable = True  # a batch is handed over as read-only views of the user's arrays
    except ValueError:
        return array.copy()
    return view


def is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients exist for tensors of this dtype."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def array_of(tensor: Tensor) -> Array:
    """Return a C-contiguous array on the memory of a tensor.

    A tensor that is not contiguous is copied, as is a conjugate or an imaginary part that PyTorch has not yet computed.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    half = tensor.dtype == torch.bfloat16
    bits = tensor.view(torch.int16) if half else tensor
    array = bits.numpy() if tensor.device.type == "cpu" else arrays.cupy().from_dlpack(bits)
    return array.view(BFLOAT16) if half else array


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


def tensors_of(tree: Tree) -> tuple[list[Tensor], Structure]:
    """Return (tensors, structure) of a tree of arrays."""
    leaves, structure = flatten(tree)
    return [tensor_of(leaf) for leaf in leaves], structure
