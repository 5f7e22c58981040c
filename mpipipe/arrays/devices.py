"""The GPUs that this process sees, and the one door to CuPy: nothing else imports it."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from types import ModuleType

import numpy as np

from mpipipe.errors import BackendError
from mpipipe.text import how_to_install

INSTALL = (
    f"{how_to_install('cuda13')} (or [cuda12], as the driver has it: nvidia-smi tells; [rocm] for "
    "AMD's GPUs), or use device='cpu'"
)
# 13 hands a kernel's None to the driver as the argument's address, and NCCL's identities are signed
# numbers.
OLDEST = 14


@cache
def cupy() -> ModuleType:
    """Return the module cupy, imported on first use; BackendError if missing or too old."""
    library = _any_cupy()
    if int(library.__version__.partition(".")[0]) < OLDEST:
        raise BackendError(
            "a GPU was asked for, and CuPy is too old",
            found=f"CuPy {library.__version__}",
            expected=f"CuPy {OLDEST} or newer",
            remedy=f"{INSTALL}; other packages of CuPy (pip list) have to be uninstalled first",
        )
    return library


@cache
def _any_cupy() -> ModuleType:
    """Return the module cupy, whatever its version."""
    try:
        import cupy
    except Exception as error:  # a broken installation raises what it likes
        why = f"{type(error).__name__}: {error}"
        raise BackendError(
            f"a GPU was asked for, and CuPy cannot be imported ({why})", remedy=INSTALL
        ) from None
    return cupy


def device_count() -> int:
    """Return the number of usable GPUs: 0 without CuPy, with an old one, or no driver."""
    try:
        cupy()
    except BackendError:
        return 0
    return visible_gpus()


def visible_gpus() -> int:
    """Return the number of GPUs that CuPy sees, also where it is too old for this package."""
    try:
        return _any_cupy().cuda.runtime.getDeviceCount()
    except (BackendError, RuntimeError):
        return 0


def use_gpu(number: int) -> None:
    """Make a GPU the current one of this process; raises BackendError if there is no such GPU."""
    count = device_count()
    if not 0 <= number < count:
        raise BackendError(
            "no such GPU",
            found=f"cuda:{number}",
            expected=f"cuda:0 ... cuda:{count - 1}, what this process sees",
            remedy="nvidia-smi -L lists the GPUs of the machine; those that CUDA_VISIBLE_DEVICES "
            "names count from 0",
        )
    cupy().cuda.Device(number).use()


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or the name of its class."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def current_gpu() -> int:
    """Return the number of the GPU that this process computes on now, from 0."""
    return cupy().cuda.runtime.getDevice()


def compute_capability() -> int:
    """Return the GPU's compute capability as one number: 90 for H100, H200."""
    return _capability(current_gpu())


@cache
def _capability(device: int) -> int:
    return int(cupy().cuda.Device(device).compute_capability)


def _text(value: bytes | str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value


def describe_gpus() -> list[str]:
    """Describe each GPU in one line: name, memory, compute capability or architecture."""
    lines = []
    for number in range(device_count()):
        properties = cupy().cuda.runtime.getDeviceProperties(number)
        name = f"cuda:{number} {_text(properties['name'])}"
        memory = f"{properties['totalGlobalMem'] / 2**30:.0f} GiB"
        architecture = f"compute capability {properties['major']}.{properties['minor']}"
        gcn = _text(properties.get("gcnArchName", ""))
        if cupy().cuda.runtime.is_hip and gcn:
            # The compiler's name, without its features.
            architecture = f"AMD {gcn.split(':')[0]}"
        lines.append(f"{name}, {memory}, {architecture}")
    return lines


# -- Whether GPUs are NVIDIA's or AMD's, and what cannot be computed on AMD's ----------------------
#
# CuPy answers for both under CUDA's names: on AMD's GPUs its `cuda` module calls HIP, its NVRTC is
# hipRTC and its cuBLAS hipBLAS. What differs for this package stands here, in common.cuh and in
# products.py.


AMD_UNTRIED = "AMD's GPUs are not supported yet: nothing of this package has run on one"


def is_amd() -> bool:
    """Return whether CuPy is built for ROCm; False for CUDA, and without CuPy."""
    try:
        return bool(cupy().cuda.runtime.is_hip)
    except BackendError:
        return False


def check_computable(kind: np.dtype, device: str) -> None:
    """Raise BackendError for a dtype in which this device cannot multiply matrices.

    CuPy's cupy_hipblas.h translates no bfloat16 (cupy-rocm-7-0 14.2): it throws where nothing can
    catch, and the process would be aborted.
    """
    if device == "cuda" and kind.name == "bfloat16" and is_amd():
        raise BackendError(
            "no matrix products of bfloat16 on AMD GPUs: CuPy's interface to hipBLAS does not know "
            "this type, and would end the process",
            found="dtype bfloat16",
            expected="float16, float32 or float64",
            remedy="use dtype='float16' (with a loss scale) or 'float32'",
        )


# -- The CUDA runtime library for others in this process -------------------------------------------
#
# CuPy has the runtime within itself. cuDNN's Python package opens `libcudart.so.12` or `.13` by
# name instead (cudnn_frontend_shim.h), which fails where the library lies in a pip package alone
# (NVIDIA/cudnn-frontend#207).


@cache
def load_cuda_runtime() -> str:
    """Load the CUDA runtime library for this process; return its file, or its name.

    It is of the version that CuPy was built for where that one is found, else of the one that is:
    the functions that cuDNN's package takes from it are the same in both. Raises BackendError
    without CuPy or without such a library.
    """
    library_name = f"libcudart.so.{cupy().cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        # A dependency of CuPy's wheels; other builds may come without it.
        from cuda import pathfinder

        path = str(pathfinder.load_nvidia_dynamic_lib("cudart").abs_path)
    except Exception as error:
        raise BackendError(
            f"{library_name} is not found ({first_line(error)})",
            remedy="pip install nvidia-cuda-runtime",
        ) from None
    if re.search(rf"{re.escape(library_name)}(\D|$)", path):
        return path
    try:
        ctypes.CDLL(library_name, ctypes.RTLD_GLOBAL)
    except OSError:
        return path
    return library_name
