"""PyTorch's tensors on the memory of arrays.

On the host that is numpy's own bridge. bfloat16, which numpy does not know, crosses as int16 of the
same bits. On a GPU it is DLPack. Who calls this has imported PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import Array, dtype, is_device
from mpipipe.processor import given_threads

Tensor: TypeAlias = Any  # torch.Tensor: PyTorch may be missing where types are checked
BFLOAT16 = dtype("bfloat16")


def share_threads() -> None:
    """Let PyTorch compute with as many threads as this rank; the pool waits meanwhile."""
    count = given_threads()
    if count is not None:
        sys.modules["torch"].set_num_threads(count)


def tensor_of(array: Array) -> Tensor:
    """Return a tensor on the memory of an array.

    Host memory that numpy may not write to (a map of a file, opened for reading) is copied: PyTorch
    knows no tensors that are read only, and a module that wrote to one would end the process.
    """
    torch = sys.modules["torch"]
    half = array.dtype == BFLOAT16
    if half:
        array = array.view(np.int16)
    if is_device(array):
        tensor = torch.from_dlpack(array)
    else:
        tensor = torch.from_numpy(_writable(array))
    if half:
        return tensor.view(torch.bfloat16)
    return tensor


def _writable(array: np.ndarray) -> np.ndarray:
    """The same memory, where its owner may write to it; else a copy."""
    if array.flags.writeable:
        return array
    view = array.view()
    try:
        # A batch is handed over as read-only views of the user's arrays.
        view.flags.writeable = True
    except ValueError:
        return array.copy()
    return view


def array_of(tensor: Tensor, contiguous: bool = True) -> Array:
    """Return an array on the memory of a tensor, C-contiguous by default.

    A tensor that is not contiguous is copied then. A conjugate or an imaginary part that PyTorch
    has not yet computed is always.
    """
    if contiguous and not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    torch = sys.modules["torch"]
    half = tensor.dtype == torch.bfloat16
    if half:
        tensor = tensor.detach().view(torch.int16)
    if tensor.is_cpu:
        array = tensor.numpy(force=True)  # all of it in one call
    else:
        array = cupy().from_dlpack(tensor.detach().resolve_conj().resolve_neg())
    if half:
        return array.view(BFLOAT16)
    return array
