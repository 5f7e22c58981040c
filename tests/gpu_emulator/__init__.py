"""A strict emulated GPU: `install()` puts modules `cupy` and `cudnn` into place that compute on the host, late.

It is stricter than a GPU where a GPU would forgive: the host cannot look at device memory without saying so, nothing
runs before something waits for it, fresh and freed memory is NaN, host memory that the device copies must be pinned,
and the arguments of kernels must have the very types of the parameters.
"""

import os
import sys
import threading
import types
from functools import partial

from . import array, blas, compiler, cudnn, memory, nccl, runtime, streams, toolkit
from .array import now, poisoned
from .compiler import compiler as host_compiler
from .machine import CUDARuntimeError, HiddenAccess, Machine, NotEmulatedError, _machines, machine

VARIABLES = ("CUDNN_FRONTEND_CUDART_LIB_NAME",)  # that the package sets for the libraries of a GPU
_replaced: list[dict] = []
_variables: list[dict] = []


class StrictModule(types.ModuleType):
    """A module that says what is missing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotEmulatedError(f"{self.__name__}.{name} is not in the part of CuPy that this package uses")


class CudaModule(StrictModule):
    """cupy.cuda, which loads cuBLAS when it is first asked for it."""

    def __getattr__(self, name):
        if name != "cublas":
            return super().__getattr__(name)
        toolkit.require_cublas()
        self.cublas = cublas_module()
        return self.cublas


def _module(name, **content):
    module = StrictModule(name)
    module.__dict__.update(content)
    return module


def _public(module):
    """The constants of a module, and the functions and classes that it defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (isinstance(value, int) or getattr(value, "__module__", "") == module.__name__)
    }


def cublas_module() -> types.ModuleType:
    """cupy.cuda.cublas, which CuPy has as an attribute only."""
    return _module("cupy.cuda.cublas", **_public(blas))


MEMORY = "Memory MemoryPointer MemoryPool MemoryAsyncPool alloc get_allocator set_allocator".split()
NCCL = {"NcclCommunicator": nccl.NcclCommunicator, "available": True}
STREAM = "Stream Event get_current_stream get_elapsed_time".split()


def cupy_modules(amd: bool = False) -> dict:
    """The modules of cupy that one can import, by name."""
    pools = {name: getattr(memory, name) for name in MEMORY}
    order = {name: getattr(streams, name) for name in STREAM}
    handle = {"get_cublas_handle": blas.get_cublas_handle}
    parts = {
        "runtime": {**_public(runtime), "CUDARuntimeError": CUDARuntimeError, "is_hip": amd},
        "memory": {**pools, "OutOfMemoryError": memory.OutOfMemoryError},
        "stream": order,
        "device": {"Device": runtime.Device, **handle},
        "compiler": {"CompileException": toolkit.CompileException},
        "nvrtc": {"getVersion": toolkit.getVersion},
        "nccl": {**_public(nccl), **NCCL},
    }
    modules = {f"cupy.cuda.{name}": _module(f"cupy.cuda.{name}", **content) for name, content in parts.items()}
    cuda = CudaModule("cupy.cuda")
    cuda.__dict__.update(
        **{name.rpartition(".")[2]: module for name, module in modules.items() if name != "cupy.cuda.nccl"},
        **pools, **order, **handle,
        Device=runtime.Device,
        using_allocator=memory.using_allocator,
        alloc_pinned_memory=memory.alloc_pinned_memory,
    )  # fmt: skip
    library = _module(
        "cupy",
        cuda=cuda,
        ndarray=array.ndarray,
        empty=array.empty,
        RawModule=compiler.RawModule,
        get_default_memory_pool=memory.get_default_memory_pool,
        __version__="14.2.0",
    )
    library.__path__ = cuda.__path__ = []
    names = ("load_nvidia_dynamic_lib", "DynamicLibNotFoundError")
    pathfinder = _module("cuda.pathfinder", **{name: getattr(toolkit, name) for name in names})
    root = _module("cuda", pathfinder=pathfinder)
    root.__path__ = []
    return {"cupy": library, "cupy.cuda": cuda, **modules, "cuda": root, "cuda.pathfinder": pathfinder}


_clearers: dict[str, tuple] = {}  # by module of the package: the module, its number of names, what empties its caches


def _clearers_of(name: str, module) -> list:
    """What empties the caches of a module, looked for again where the module has got a name or lost one."""
    known, names, found = _clearers.get(name, (None, 0, []))
    if known is not module or names != len(vars(module)):
        found = []
        for value in list(vars(module).values()):
            if callable(getattr(value, "cache_clear", None)) and not isinstance(value, type):
                found.append(value.cache_clear)
            elif isinstance(value, threading.local):
                found.append(partial(_empty, value))
        _clearers[name] = (module, len(vars(module)), found)
    return found


def _empty(local: threading.local):
    vars(local).clear()
    local.__init__()  # of a class of its own


def _forget():
    """Clear what the package keeps of a device: compiled functions, streams, tables, pages."""
    for name in [name for name in sys.modules if name == "mpipipe" or name.startswith("mpipipe.")]:
        for clear in _clearers_of(name, sys.modules[name]):
            clear()


REPLACED = ("cupy", "cudnn", "cuda")  # packages
BELOW = tuple(f"{name}." for name in REPLACED)


def _replaceable() -> list[str]:
    """The modules of these packages that are imported."""
    return [name for name in sys.modules if name in REPLACED or name.startswith(BELOW)]


def install(seed: int = 0, devices: int = 1, faults=(), memory: int = 1 << 34, amd: bool = False) -> Machine:
    """Put the emulated device in the place of CuPy and cuDNN, and return it.

    With seed 0 nothing runs before it must; with others the device also works by itself, as the seed has it. With `amd`
    it is one that CuPy for ROCm drives: sources are compiled as HIP's, for wavefronts of 64 lanes, products are
    hipBLAS's, and there is no cuDNN.
    """
    home = Machine(seed, devices, faults, memory, amd)
    _machines.append(home)
    names = {name: getattr(cudnn, name) for name in cudnn.NAMES}
    no_cudnn = None  # importing it raises ImportError
    modules = {**cupy_modules(amd), "cudnn": no_cudnn if amd else _module("cudnn", **names, __version__="1.27.0")}
    _variables.append({name: os.environ.pop(name) for name in VARIABLES if name in os.environ})
    hidden = _replaceable()
    _replaced.append({name: sys.modules.pop(name) for name in hidden})
    sys.modules.update(modules)
    _forget()
    return home


def emulated() -> bool:
    """Whether an emulated device is installed."""
    return bool(_machines)


def uninstall() -> list[str]:
    """Undo `install` after everything that was queued has run; return what went wrong on the device since."""
    home = _machines[-1]
    home.drain()  # while the package still has its buffers of copies under way
    _forget()
    errors = list(home.drain())
    for name in _replaceable():
        del sys.modules[name]
    sys.modules.update(_replaced.pop())
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(_variables.pop())
    _machines.pop()
    return errors


__all__ = [
    "CUDARuntimeError", "HiddenAccess", "Machine", "cublas_module", "cupy_modules", "emulated", "host_compiler",
    "install", "machine", "now", "poisoned", "uninstall",
]  # fmt: skip
