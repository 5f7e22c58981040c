"""Device memory that is exhausted: what was asked for, and what there is."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from mpipipe.arrays.devices import cupy

# where CUDA's libraries ask for memory by themselves; they do not say how much
SAID = ("cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Shortage(NamedTuple):
    """Memory of the current GPU when a request for more of it had failed.

    Attributes
    ----------
    asked : int or None
        Bytes asked for; None if the library that asked does not say.
    free : int
        Bytes that nobody uses, in CuPy's pool and beyond it.
    total : int
        Bytes of the GPU, or those that CuPy's pool is limited to.
    """

    asked: int | None
    free: int
    total: int


def memory_shortage(error: BaseException) -> Shortage | None:
    """Return what an error says about device memory.

    Parameters
    ----------
    error : BaseException
        Any error.

    Returns
    -------
    Shortage or None
        None if the error is of another kind.

    Examples
    --------
    >>> from mpipipe import arrays
    >>> arrays.memory_shortage(ValueError("no shortage")) is None
    True
    """
    if "cupy" not in sys.modules:
        return None
    library = cupy()
    said = isinstance(error, RuntimeError) and any(name in str(error) for name in SAID)
    if not said and not isinstance(error, library.cuda.memory.OutOfMemoryError):
        return None
    asked = re.search(r"allocating ([\d,]+) bytes", str(error))
    free, total = library.cuda.runtime.memGetInfo()
    pool = library.get_default_memory_pool()
    limit = pool.get_limit()  # CUPY_GPU_MEMORY_LIMIT, or what the program has set; 0 without one
    if limit:
        free, total = min(free, max(0, limit - pool.total_bytes())), min(total, limit)
    return Shortage(int(asked[1].replace(",", "")) if asked else None, free + pool.free_bytes(), total)
