"""NCCL as CuPy brings it (RCCL where CuPy is built for ROCm), and what one must know of a GPU to use it."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from mpipipe.arrays.devices import cupy, current_gpu
from mpipipe.arrays.dtypes import dtype
from mpipipe.errors import BackendError

REMEDY = "pip install nvidia-nccl-cu13 (or -cu12, as CuPy is), or load the site's NCCL module"
NAMES = {
    "int8": ("NCCL_INT8", 1),
    "uint8": ("NCCL_UINT8", 1),
    "int32": ("NCCL_INT32", 1),
    "uint32": ("NCCL_UINT32", 1),
    "int64": ("NCCL_INT64", 1),
    "uint64": ("NCCL_UINT64", 1),
    "float16": ("NCCL_FLOAT16", 1),
    "bfloat16": ("NCCL_BFLOAT16", 1),
    "float32": ("NCCL_FLOAT32", 1),
    "float64": ("NCCL_FLOAT64", 1),
    "complex64": ("NCCL_FLOAT32", 2),  # a sum of complex numbers is one of twice as many real ones
    "complex128": ("NCCL_FLOAT64", 2),
}


@cache
def nccl() -> Any:
    """Return the module cupy.cuda.nccl (RCCL on ROCm), imported on first use; raises BackendError if it is missing."""
    cupy()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's on how to install what it does not find
            module = import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise BackendError(f"CuPy has no NCCL ({error})", remedy=REMEDY) from None
    if not module.available:
        raise BackendError("CuPy does not find libnccl", remedy=REMEDY)
    return module


def nccl_type(kind: np.dtype) -> tuple[int, int] | None:
    """Return (NCCL's number of a dtype, elements of it in one of ours); None for a dtype that NCCL cannot add."""
    name, count = NAMES.get(dtype(kind).name, ("", 0))
    return (int(getattr(nccl(), name)), count) if name else None


def bus_id() -> str:
    """Return the PCI address of the current GPU, "0000:41:00.0", the same for all processes of a machine."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(current_gpu()))


def multiprocessors() -> int:
    """Return the number of multiprocessors of the current GPU, such as 132."""
    return int(cupy().cuda.runtime.getDeviceProperties(current_gpu())["multiProcessorCount"])
