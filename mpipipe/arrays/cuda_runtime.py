"""The CUDA runtime library for others in this process.

CuPy has the runtime within itself. cuDNN's Python package opens `libcudart.so.12` or `.13` by name instead
(cudnn_frontend_shim.h), which fails where the library lies in a pip package alone (NVIDIA/cudnn-frontend#207).
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from types import ModuleType

from mpipipe.arrays.devices import cupy
from mpipipe.errors import BackendError


def load_cuda_runtime() -> str:
    """Load the CUDA runtime library, so that others in this process find it by its name.

    Returns
    -------
    str
        Its file, or its name. Of the version that CuPy was built for where that one is found, else of the one that is:
        the functions that cuDNN's package takes from it are the same in both.

    Raises
    ------
    BackendError
        CuPy is not installed, or there is no such library.
    """
    return _loaded(cupy())


@lru_cache(maxsize=8)
def _loaded(library: ModuleType) -> str:
    wanted = f"libcudart.so.{library.cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        from cuda import pathfinder  # a dependency of CuPy's wheels; other builds may come without it

        found = str(pathfinder.load_nvidia_dynamic_lib("cudart").abs_path)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise BackendError(f"{wanted} is not found ({lines[0]})", remedy="pip install nvidia-cuda-runtime") from None
    if re.search(rf"{re.escape(wanted)}(\D|$)", found):
        return found
    try:
        ctypes.CDLL(wanted, ctypes.RTLD_GLOBAL)
    except OSError:
        return found
    return wanted
