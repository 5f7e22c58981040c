"""Whether cuDNN computes attention on this GPU: it is asked for two small plans before anything depends on it.

A library that is installed may still fail to make a single plan: without the CUDA runtime or its own engines, with
another CUDA than the driver's, or with two of its versions in one process.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType

from mpipipe import arrays
from mpipipe.attention.kernels import cudnn_graph, cudnn_library
from mpipipe.attention.kernels.cudnn_graph import Request
from mpipipe.attention.kernels.cudnn_library import INSTALL, Verdict

ROWS, HEADS, DIM = 128, 1, 64  # what every cuDNN does on every GPU that it does at all
ALONG = {"forward": ("q", "k", "v", "out", "lse"),
         "backward": ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")}  # fmt: skip


def available() -> Verdict:
    """Whether attention by cuDNN is usable on the current GPU, which must be there; tried once in a process."""
    found = cudnn_library.installed()
    return _tried(cudnn_library.library(), arrays.current_gpu()) if found.usable else found


@lru_cache(maxsize=64)
def _tried(_library: ModuleType, _device: int) -> Verdict:
    found = cudnn_library.installed()
    if arrays.compute_capability() < 80:
        return Verdict(False, f"{found.reason} computes attention on compute capability 8.0 and newer", found.version)
    missing = ""
    try:
        missing = cudnn_library.prepare()
        for direction in ALONG:
            cudnn_graph.make_plan(request(direction))
    except Exception as error:  # the package raises classes of its own, and RuntimeError
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why = f"{found.reason} is installed and makes no plan ({lines[0]}"
        reason = f"{why}{'; ' if missing else ''}{missing}); {INSTALL}"
        warnings.warn(f"attention on the GPU is computed by slower kernels: {reason}", stacklevel=2)
        return Verdict(False, reason, found.version)
    return found


def request(direction: str) -> Request:
    """A small causal request, "forward" or "backward"."""
    dims = 1, HEADS, ROWS, DIM
    strides = HEADS * ROWS * DIM, DIM, HEADS * DIM, 1
    rows = (1, HEADS, ROWS, 1), (HEADS * ROWS, ROWS, 1, 1)
    shapes = tuple((name, *(rows if name == "lse" else (dims, strides))) for name in ALONG[direction])
    return Request(direction, "bfloat16", shapes, DIM**-0.5, None, 0)
