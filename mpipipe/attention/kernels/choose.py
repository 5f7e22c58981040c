"""Which kernel computes attention."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, cast

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention.kernels import cudnn_graph
from mpipipe.attention.kernels.interface import AttentionKernel
from mpipipe.errors import ArgumentError, BackendError

if TYPE_CHECKING:  # mypy checks here that every module has the functions of a kernel
    from mpipipe.attention.kernels import cudnn, cupy, host, torch_cpu

    KERNELS: tuple[AttentionKernel, ...] = (host, torch_cpu, cudnn, cupy)

VARIABLE = "MPIPIPE_ATTENTION"
MODULES = {  # name -> (module, where its arrays are)
    "host": ("mpipipe.attention.kernels.host", "cpu"),
    "torch": ("mpipipe.attention.kernels.torch_cpu", "cpu"),
    "cudnn": ("mpipipe.attention.kernels.cudnn", "cuda"),
    "cupy": ("mpipipe.attention.kernels.cupy", "cuda"),
}


def chosen(q: Array | None = None, k: Array | None = None, v: Array | None = None) -> AttentionKernel:
    """Return the kernel for these arrays; without arrays, the one for host arrays.

    Raises ArgumentError if the variable names no kernel, or one that does not do such arrays. Raises BackendError if
    the library that it names is not installed.
    """
    name = _named()
    device = MODULES[name][1] if name else ""
    on_gpu = q is not None and arrays.is_device(q)
    if q is not None and k is not None and v is not None and on_gpu:
        return load(_device_kernel(name if device == "cuda" else "", q, k, v))
    name = name if device == "cpu" else "host"
    try:
        return load(name)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise BackendError(
            f"{VARIABLE}={name} asks for PyTorch, which is not installed",
            remedy=f"pip install torch, or unset {VARIABLE} to use the numpy kernel",
        ) from None


def check_choice(device: str) -> None:
    """Raise what `chosen` would raise for any arrays on this device, before there are arrays."""
    if _named() == "cudnn" and device == "cuda":
        _require_cudnn(cudnn_graph.available())


def _named() -> str:
    name = os.environ.get(VARIABLE, "")
    if name and name not in MODULES:
        raise ArgumentError(
            f"{VARIABLE} names no attention kernel",
            found=repr(name),
            expected=" or ".join(MODULES),
            remedy=f"unset {VARIABLE}, or set it to one of these",
        )
    return name


def _require_cudnn(verdict: cudnn_graph.CudnnVerdict) -> None:
    if not verdict.usable:
        raise BackendError(f"{VARIABLE}=cudnn asks for cuDNN: {verdict.reason}", remedy=f"or unset {VARIABLE}")


def load(name: str) -> AttentionKernel:
    """Return the kernel of this name; raises ImportError where its library is missing."""
    return cast(AttentionKernel, import_module(MODULES[name][0]))


def _device_kernel(name: str, q: Array, k: Array, v: Array) -> str:
    if name == "cupy":
        return name
    verdict = cudnn_graph.available()
    if name == "cudnn":
        _require_cudnn(verdict)
    refused = cudnn_graph.refusal(q, k, v) if verdict.usable else verdict.reason
    if name == "cudnn" and refused:
        raise ArgumentError(
            f"{VARIABLE}=cudnn asks for cuDNN, which does not do these arrays",
            found=refused,
            remedy=f"unset {VARIABLE}, and the CuPy kernels do what cuDNN does not",
        )
    return "cupy" if refused else "cudnn"


def describe() -> str:
    """One line about the kernels for a GPU in half precision, else for the host: "cudnn 9.24.0", "cupy because ..."."""
    name = os.environ.get(VARIABLE, "")
    device = MODULES.get(name, ("", ""))[1]
    verdict = cudnn_graph.installed()
    if not arrays.device_count():
        host = name if device == "cpu" else "host"
        return f"{host}, as there is no GPU ({verdict.reason}{' is installed' if verdict.usable else ''})"
    if device == "cuda" and name != "cudnn":
        return f"{name} because {VARIABLE} says so"
    verdict = cudnn_graph.available()
    return verdict.reason.replace("cuDNN", "cudnn", 1) if verdict.usable else f"cupy because {verdict.reason}"
