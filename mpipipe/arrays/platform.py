"""Whether GPUs are NVIDIA's or AMD's, and what cannot be computed on AMD's.

CuPy answers for both under CUDA's names: on AMD's GPUs its `cuda` module calls HIP, its NVRTC is hipRTC and its cuBLAS
hipBLAS. What differs for this package stands here, in common.cuh and in gemm.py.
"""

from __future__ import annotations

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.errors import BackendError

AMD_UNTRIED = "AMD's GPUs are not supported yet: nothing of this package has run on one"


def is_amd() -> bool:
    """Return whether CuPy computes on AMD's GPUs.

    Returns
    -------
    bool
        True if CuPy is built for ROCm; False for CUDA, and without CuPy.
    """
    try:
        return bool(cupy().cuda.runtime.is_hip)
    except BackendError:
        return False


def check_computable(kind: np.dtype, device: str) -> None:
    """Refuse a dtype in which this device cannot compute matrix products.

    CuPy's cupy_hipblas.h translates no bfloat16 (cupy-rocm-7-0 14.2): it throws where nothing can catch, and the
    process would be aborted.

    Parameters
    ----------
    kind : numpy.dtype
        A dtype of COMPUTE_DTYPES.
    device : str
        `"cpu"` or `"cuda"`.

    Raises
    ------
    BackendError
        bfloat16 was asked for, on an AMD GPU.

    Examples
    --------
    >>> from mpipipe import arrays
    >>> arrays.check_computable(arrays.dtype("bfloat16"), "cpu")
    """
    if device == "cuda" and kind.name == "bfloat16" and is_amd():
        raise BackendError(
            "no matrix products of bfloat16 on AMD GPUs: CuPy's interface to hipBLAS does not know this type, "
            "and would end the process",
            found="dtype bfloat16",
            expected="float16, float32 or float64",
            remedy="use dtype='float16' (with a loss scale) or 'float32'",
        )
