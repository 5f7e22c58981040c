"""Attention on one device: one module for each library that can do it, with the same functions.

The environment variable MPIPIPE_ATTENTION chooses, whenever attention is computed. For host arrays:

    host (default)   kernels/host.py, numpy alone
    torch            kernels/torch_cpu.py, PyTorch's flash kernel, where PyTorch is installed

For device arrays the default is cudnn where it is installed and does such arrays, else cupy:

    cudnn            kernels/kernel.py, cuDNN's fused kernels, for half precision
    cupy             kernels/cupy.py, matrix products and kernels of our own, for everything

A choice for one kind of device leaves the other at its default.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from mpipipe import arrays
from mpipipe.errors import ArgumentError, BackendError

VARIABLE = "MPIPIPE_ATTENTION"
MODULES = {
    "host": "mpipipe.attention.kernels.host",
    "torch": "mpipipe.attention.kernels.torch_cpu",
    "cudnn": "mpipipe.attention.kernels.cudnn",
    "cupy": "mpipipe.attention.kernels.cupy",
}
ON_DEVICE = ("cudnn", "cupy")


def chosen(q=None, k=None, v=None) -> ModuleType:
    """The module whose `forward` and `backward` to use for these arrays; without arrays, for host arrays.

    Raises ArgumentError where the variable names no kernel, or one that does not do such arrays; BackendError where the
    library that it asks for is not installed.
    """
    name = os.environ.get(VARIABLE, "")
    if name and name not in MODULES:
        raise ArgumentError(
            f"{VARIABLE} names no attention kernel",
            found=repr(name),
            expected=" or ".join(MODULES),
            remedy=f"unset {VARIABLE}, or set it to one of these",
        )
    if q is not None and arrays.is_device(q):
        return import_module(MODULES[_device_kernel(name if name in ON_DEVICE else "", q, k, v)])
    name = "host" if name in ("", *ON_DEVICE) else name
    try:
        return import_module(MODULES[name])
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise BackendError(
            f"{VARIABLE}={name} asks for PyTorch, which is not installed",
            remedy=f"pip install torch, or unset {VARIABLE} to use the numpy kernel",
        ) from None


def _device_kernel(name, q, k, v) -> str:
    from mpipipe.attention.kernels import cudnn

    if name == "cupy":
        return name
    found, refused = cudnn.available(), cudnn.refusal(q, k, v)
    if name == "cudnn" and not found.usable:
        raise BackendError(f"{VARIABLE}=cudnn asks for cuDNN: {found.reason}", remedy=f"or unset {VARIABLE}")
    if name == "cudnn" and refused:
        raise ArgumentError(
            f"{VARIABLE}=cudnn asks for cuDNN, which does not do these arrays",
            found=refused,
            remedy=f"unset {VARIABLE}, and the CuPy kernels do what cuDNN does not",
        )
    return "cupy" if refused or not found.usable else "cudnn"


def describe() -> str:
    """One line about the kernels for a GPU in half precision: which cuDNN, or why none."""
    from mpipipe.attention.kernels import cudnn

    found = cudnn.available()
    return found.reason if found.usable else f"CuPy kernels, no cuDNN: {found.reason}"
