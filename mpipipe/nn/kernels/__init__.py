"""The arithmetic of layers, losses and optimizers.

`interface` states the functions, and four modules hold them.

host.any_dtype        numpy arrays of every dtype
host.full_precision   numpy arrays of float32 and float64, without a look at the dtype in each call
torch_cpu             numpy arrays of halves by PyTorch, where the processor multiplies them
cuda                  cupy arrays, by CUDA C++ next to it and cuBLAS
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import numpy as np

from mpipipe import arrays, processor
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.nn.kernels import cuda
from mpipipe.nn.kernels.host import any_dtype, full_precision
from mpipipe.nn.kernels.interface import AdamWNumbers, Kernels, Update

__all__ = ["AdamWNumbers", "Kernels", "Update", "describe", "of", "of_array"]

VARIABLE = "MPIPIPE_HALVES"
# what a processor has that multiplies halves faster than float32 and sums in float32, as
# /proc/cpuinfo calls it
INSTRUCTIONS = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16"),
    "float16": ("amx_fp16", "avx512_fp16"),
}


# mypy compares each module with the interface here
ANY_DTYPE: Kernels = any_dtype
FULL_PRECISION: Kernels = full_precision
CUDA: Kernels = cuda


def of(device: str, dtype: np.dtype | None = None) -> Kernels:
    """Return the kernels for arrays of `dtype`, or of any dtype, on "cpu" or "cuda".

    Raises ArgumentError or BackendError where MPIPIPE_HALVES has a value that cannot be.
    """
    if device == "cuda":
        return CUDA
    if dtype is None:
        return ANY_DTYPE
    if not arrays.is_half(dtype):
        return FULL_PRECISION
    return _of_halves(dtype, os.environ.get(VARIABLE, ""))


def of_array(array: Array) -> Kernels:
    """Return the kernels for an array; raise ArgumentError for anything else."""
    if not isinstance(array, np.ndarray):
        return of(arrays.device_of(array))
    if array.itemsize == 2:
        return of("cpu", array.dtype)
    return FULL_PRECISION


@lru_cache
def _of_halves(dtype: np.dtype, setting: str) -> Kernels:
    name, _ = _chosen(dtype, setting)
    if name == "numpy":
        return ANY_DTYPE
    try:
        return cast(Kernels, import_module("mpipipe.nn.kernels.torch_cpu").KERNELS)
    except ImportError as error:
        raise BackendError(
            f"products of {dtype.name} are to be PyTorch's, which cannot be imported",
            found=error,
            remedy=f"pip install torch, or set {VARIABLE}=numpy",
        ) from None


def _chosen(dtype: np.dtype, setting: str) -> tuple[str, str]:
    """Return the library that multiplies these halves on the host, "numpy" or "torch", and why."""
    if setting not in ("", "numpy", "torch"):
        raise ArgumentError(
            f"environment variable {VARIABLE}", found=repr(setting), expected="numpy or torch"
        )
    if setting:
        return setting, f": {VARIABLE} says so"
    usable = sorted(processor.features() & {*INSTRUCTIONS[dtype.name]})
    if not usable:
        return "numpy", ", in float32: this processor has no instructions for it"
    if not find_spec("torch"):
        return "numpy", f", in float32: PyTorch is not installed, and could use {usable[0]}"
    return "torch", f": this processor has {usable[0]}"


def describe() -> str:
    """Say for each kind of halves what computes with them on the host."""
    lines = []
    for kind in INSTRUCTIONS:
        name, reason = _chosen(arrays.dtype(kind), os.environ.get(VARIABLE, ""))
        lines.append(f"{kind} by {name}{reason}")
    return "\n".join(lines)
