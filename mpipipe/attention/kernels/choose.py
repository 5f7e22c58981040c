"""Which kernel computes attention."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention.kernels import cudnn_graph
from mpipipe.attention.kernels.interface import AttentionKernel
from mpipipe.errors import ArgumentError, BackendError

if TYPE_CHECKING:  # mypy checks here that every module has the functions of a kernel
    from mpipipe.attention.kernels import cudnn, cupy, host

    KERNELS: tuple[AttentionKernel, ...] = (host, cudnn, cupy)

VARIABLE = "MPIPIPE_ATTENTION"
NAMES = ("cudnn", "cupy")  # the kernels for device arrays


def chosen(q: Array, k: Array, v: Array) -> AttentionKernel:
    """Return the kernel for these arrays.

    Raises ArgumentError if the variable names no kernel, or one that does not do such arrays.
    Raises BackendError if the library that it names is not installed.
    """
    name = _named()
    if not arrays.is_device(q):
        return load("host")
    if name == "cupy":
        return load(name)
    verdict = cudnn_graph.available()
    refused = verdict.reason
    if verdict.usable:
        refused = cudnn_graph.refusal(q, k, v)
    if name == "cudnn":
        _require_cudnn(verdict)
    elif refused:
        return load("cupy")
    if refused:
        raise ArgumentError(
            f"{VARIABLE}=cudnn asks for cuDNN, which does not do these arrays",
            found=refused,
            remedy=f"unset {VARIABLE}, and the CuPy kernels do what cuDNN does not",
        )
    return load("cudnn")


def check_choice(device: str) -> None:
    """Raise what `chosen` would raise for any arrays on this device, before there are arrays."""
    if _named() == "cudnn" and device == "cuda":
        _require_cudnn(cudnn_graph.available())


def _named() -> str:
    name = os.environ.get(VARIABLE, "")
    if name and name not in NAMES:
        raise ArgumentError(
            f"{VARIABLE} names no attention kernel for a GPU",
            found=repr(name),
            expected=" or ".join(NAMES),
            remedy=f"unset {VARIABLE}; host arrays are always computed by numpy",
        )
    return name


def _require_cudnn(verdict: cudnn_graph.CudnnVerdict) -> None:
    if not verdict.usable:
        raise BackendError(
            f"{VARIABLE}=cudnn asks for cuDNN: {verdict.reason}", remedy=f"or unset {VARIABLE}"
        )


@cache
def load(name: str) -> AttentionKernel:
    """Return the kernel of this name; raises ImportError where its library is missing."""
    return cast(AttentionKernel, import_module(f"mpipipe.attention.kernels.{name}"))


def describe() -> str:
    """Describe the kernels in one line: "cudnn 9.24.0", "cupy because ..."."""
    if not arrays.device_count():
        verdict = cudnn_graph.installed()
        return (
            "host, as there is no GPU "
            f"({verdict.reason}{' is installed' if verdict.usable else ''})"
        )
    if os.environ.get(VARIABLE) == "cupy":
        return f"cupy because {VARIABLE} says so"
    verdict = cudnn_graph.available()
    if verdict.usable:
        return verdict.reason.replace("cuDNN", "cudnn", 1)
    return f"cupy because {verdict.reason}"
