"""cuda.pathfinder and cupy.cuda.nvrtc: what of CUDA a machine has besides the driver, and how each part is missed.

The texts are those of CuPy 14.2, cuda-pathfinder 1.9 and nvidia-cudnn-frontend 1.27.
"""

from typing import NamedTuple

from . import cublas
from .machine import machine

MAJOR, OTHER = 13, 12  # CUDA that CuPy is built for, and the other one


class DynamicLibNotFoundError(RuntimeError):
    """cuda.pathfinder.DynamicLibNotFoundError."""


DynamicLibNotFoundError.__module__ = "cuda.pathfinder._dynamic_libs.load_dl_common"


class CompileException(RuntimeError):
    """What cupy.cuda.compiler.CompileException is."""


class LoadedDL(NamedTuple):
    abs_path: str


def _not_found(library: str) -> str:
    names = f"{library}.so.{MAJOR} or {library}.so.{OTHER}"
    return f'Failure finding "{names}": No such file: {names}'


def load_nvidia_dynamic_lib(libname: str) -> LoadedDL:
    home = machine()
    if libname == "cublas":
        if "cublas" in home.faults:
            raise DynamicLibNotFoundError(_not_found("libcublas"))
        return LoadedDL(cublas.library())
    assert libname == "cudart", libname
    if "libcudart" in home.faults:
        raise DynamicLibNotFoundError(_not_found("libcudart"))
    version = OTHER if "two cudas" in home.faults else MAJOR
    return LoadedDL(f"/site-packages/nvidia/cu{MAJOR}/lib/libcudart.so.{version}")


def getVersion() -> tuple[int, int]:
    """cupy.cuda.nvrtc.getVersion."""
    if "compiler" in machine().faults:
        raise DynamicLibNotFoundError(_not_found("libnvrtc"))
    return (OTHER, 2) if "two cudas" in machine().faults else (MAJOR, 5)


def compile_check():
    """Raise what CuPy raises where it cannot compile a kernel."""
    version = getVersion()
    if "headers" in machine().faults:
        raise RuntimeError("Failed to find CUDA headers. Please install the CUDA toolkit headers")
    if version[0] != MAJOR:
        raise CompileException("cuda_fp16.hpp(1): error: identifier is undefined in this version of NVRTC")


def require_cublas():
    """Raise what CuPy raises at the first use of cuBLAS where it is not found."""
    if "cublas" in machine().faults:
        raise ImportError(_not_found("libcublasLt"))
