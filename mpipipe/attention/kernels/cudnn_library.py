"""cuDNN by NVIDIA's Python package `cudnn` (nvidia-cudnn-frontend): whether it is installed, and its handles."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.errors import BackendError

OLDEST = 91100  # 9.11.0; the attention of 9.10.0 and 9.10.1 gives wrong results
INSTALL = "pip install 'nvidia-cudnn-frontend>=1.26,<1.27' nvidia-cudnn-cu13 (or -cu12)"
RUNTIME = "CUDNN_FRONTEND_CUDART_LIB_NAME"  # by which the package opens the CUDA runtime, since 1.26


class Verdict(NamedTuple):
    """Whether cuDNN is usable.

    reason : its version in words, or what is missing
    version : (major, minor, patch); empty if the library cannot be loaded
    """

    usable: bool
    reason: str
    version: tuple[int, ...] = ()


def installed() -> Verdict:
    """Whether package and library are there, and new enough. Needs no GPU: `cudnn_trial.available` asks that."""
    return _looked_up(sys.modules.get("cudnn"))


@lru_cache(maxsize=8)
def _looked_up(_loaded: ModuleType | None) -> Verdict:
    if arrays.is_amd():
        return Verdict(False, "AMD's GPUs have no cuDNN")
    try:
        import cudnn
    except Exception as error:  # a broken installation raises anything
        return Verdict(False, f"the Python package cudnn cannot be imported ({error}); {INSTALL}")
    try:
        version = _version(cudnn)
    except Exception as error:
        return Verdict(False, f"the library libcudnn.so.9 cannot be loaded ({error}); {INSTALL}")
    numbers = version // 10000, version // 100 % 100, version % 100
    text = f"cuDNN {'.'.join(map(str, numbers))}"
    if version < OLDEST:
        reason = f"{text} is too old, its attention has known errors: 9.11.0 or newer is needed"
        return Verdict(False, reason, numbers)
    return Verdict(True, text, numbers)


def _version(cudnn: Any) -> int:
    try:
        return cudnn.backend_version()
    except Exception:
        # the package looks only in the interpreter's own site-packages, not in a user's or in those beneath a venv
        found = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
        for place in found.submodule_search_locations or [] if found else []:
            for file in sorted(Path(place).glob("lib/libcudnn.so.*")):
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
                return cudnn.backend_version()
        raise


def library() -> Any:
    """The module cudnn; call it only if `installed().usable`."""
    import cudnn

    return cudnn


def prepare() -> str:
    """Make the package find the CUDA runtime that CuPy would use; return why it cannot, or "".

    The package opens `libcudart` by name where it asks for a GPU itself, and to fill working memory. Of two versions on
    the loader's path it takes the older one, with a line on stderr. What the user has set stays.
    """
    try:
        found = arrays.load_cuda_runtime()
    except BackendError as error:
        return str(error)
    os.environ.setdefault(RUNTIME, found)
    return ""


class _Handles(threading.local):
    """A thread's handles by library, device and stream."""

    def __init__(self) -> None:
        self.made: dict[tuple, Any] = {}


_handles = _Handles()


def handle() -> Any:
    """CuDNN's handle for the current GPU, stream and thread."""
    key = library(), arrays.cupy().cuda.runtime.getDevice(), arrays.stream().ptr
    if key not in _handles.made:
        made = library().create_handle()
        library().set_stream(handle=made, stream=key[2])
        _handles.made[key] = made
    return _handles.made[key]
