"""Whether a device can be used: a driver, a GPU, and what compiles and multiplies on it.

CuPy's wheel does not bring the CUDA toolkit. What is missing would show at the first kernel or the
first product, in the middle of a step, on the rank that comes to it first. So the first use of a
GPU looks for all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpipipe.arrays.cuda import cuda_function
from mpipipe.arrays.devices import AMD_UNTRIED, cupy, use_gpu, visible_gpus
from mpipipe.errors import BackendError

PROBE = Path(__file__).with_name(
    "fill.cu"
)  # a short one; common.cuh in front of it includes all headers
ASKED = "device 'cuda' was asked for, and"
NO_DRIVER = (
    "run on a node with an NVIDIA GPU and its driver (nvidia-smi must answer), or use device='cpu'"
)
NO_GPU = (
    "ask the batch system for GPUs (--gpus-per-node), look at CUDA_VISIBLE_DEVICES, or use "
    "device='cpu'"
)


def check_device(device: str) -> str:
    """Return "cpu" or "cuda" for a device that compiles kernels and multiplies matrices.

    `device` is "cpu"; "cuda", the current GPU of this process; "cuda:1", which becomes the current
    one; or "auto", the GPU where there is one. The first call for a GPU compiles a kernel of one
    line and takes cuBLAS's memory. Raises BackendError with a line for each part that is missing.
    Nothing is simulated.
    """
    name, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if name not in ("cpu", "cuda", "auto") or (colon and (name != "cuda" or not number.isdigit())):
        raise BackendError(
            "unknown device", found=repr(device), expected="'cpu', 'cuda', 'cuda:N' or 'auto'"
        )
    if name == "auto":
        # A CuPy that is too old is no reason to take the CPU in silence.
        name = "cuda" if visible_gpus() else "cpu"
    if name == "cuda":
        runtime = cupy().cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except RuntimeError as error:
            raise BackendError(f"{ASKED} no GPU can be used ({error})", remedy=NO_DRIVER) from None
        if count == 0:
            raise BackendError(f"{ASKED} this process sees no GPU", found="0 GPUs", remedy=NO_GPU)
        if number:
            use_gpu(int(number))
        missing = _looked_for(cupy(), runtime.getDevice())
        if missing:
            untried = f". {AMD_UNTRIED}" if runtime.is_hip else ""
            raise BackendError(
                f"{ASKED} parts of the GPU's toolkit that CuPy needs cannot be used{untried}",
                found="".join(f"\n    {line}" for line in missing),
                remedy=_remedy(runtime),
            )
    return name


def missing_parts() -> list[str]:
    """List the parts of the CUDA toolkit that do not work on the current GPU, and why."""
    return list(_missing(cupy()))


def _remedy(runtime: Any) -> str:
    if runtime.is_hip:
        return "load the ROCm module of this site, and set ROCM_HOME where CuPy does not find it"
    major = runtime.runtimeGetVersion() // 1000  # the runtime within CuPy
    return (
        f"pip install 'cupy-cuda{major}x[ctk]', or load the CUDA {major} module of this site, "
        "and no other"
    )


@lru_cache(maxsize=64)
def _looked_for(library: ModuleType, device: int) -> tuple[str, ...]:
    return tuple(_missing(library))


def _missing(library: ModuleType) -> Iterator[str]:
    why = _failure(lambda: cuda_function(PROBE, "fill", T=np.dtype(np.float32)))
    if why:
        yield f"the first kernel does not compile: {why}"
    why = _failure(lambda: (library.cuda.cublas, library.cuda.device.get_cublas_handle()))
    if why:
        yield f"the library cuBLAS: {why}"


def _failure(attempt: Callable[[], object]) -> str:
    """Return the first line of what an attempt raises, or ""."""
    try:
        attempt()
    except Exception as error:  # missing parts raise ImportError, RuntimeError, CompileException
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return ""
