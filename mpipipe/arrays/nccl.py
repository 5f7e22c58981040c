"""NCCL as CuPy brings it (RCCL for ROCm), and what one must know of a GPU to use it."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np

from mpipipe.arrays.devices import cupy, current_gpu
from mpipipe.arrays.dtypes import dtype
from mpipipe.errors import BackendError

REMEDY = "pip install nvidia-nccl-cu13 (or -cu12, as CuPy is), or load the site's NCCL module"
NUMBERS = set("int8 uint8 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split())
# A sum of these is one of twice as many real numbers.
PAIRS = dict(complex64="float32", complex128="float64")


@cache
def nccl() -> ModuleType:
    """Return the module cupy.cuda.nccl, imported on first use; BackendError if missing."""
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
    """Return (NCCL's dtype, its elements in one of ours); None if NCCL cannot add it."""
    name = dtype(kind).name
    real = PAIRS.get(name, name)
    if real not in NUMBERS:
        return None
    return int(getattr(nccl(), f"NCCL_{real.upper()}")), 1 + (name in PAIRS)


def bus_id() -> str:
    """Return the PCI address of the current GPU, the same in all processes of a machine."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(current_gpu()))
