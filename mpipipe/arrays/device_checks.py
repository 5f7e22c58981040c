"""Whether a device can be used: a driver, a GPU, and what compiles and multiplies on it.

CuPy's wheel does not bring the CUDA toolkit. What is missing would show at the first kernel or the
first product, in the middle of a step, on the rank that comes to it first. So the first use of a
GPU looks for all of it at once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

from mpipipe.arrays.cuda import cuda_function
from mpipipe.arrays.devices import AMD_UNTRIED, cupy, first_line, use_gpu, visible_gpus
from mpipipe.arrays.dtypes import FLOAT32
from mpipipe.errors import BackendError

# A short one; common.cuh in front of it includes all headers.
PROBE = Path(__file__).with_name("fill.cu")
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
        missing = _looked_for(runtime.getDevice())
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
    cuda = cupy().cuda
    attempts = {
        "the first kernel does not compile": lambda: cuda_function(PROBE, "fill", T=FLOAT32),
        "the library cuBLAS": lambda: (cuda.cublas, cuda.device.get_cublas_handle()),
    }
    missing = []
    for what, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:  # ImportError, RuntimeError, CompileException
            missing.append(f"{what}: {first_line(error)}")
    return missing


def _remedy(runtime: ModuleType) -> str:
    if runtime.is_hip:
        return "load the ROCm module of this site, and set ROCM_HOME where CuPy does not find it"
    major = runtime.runtimeGetVersion() // 1000  # the runtime within CuPy
    return (
        f"pip install 'cupy-cuda{major}x[ctk]', or load the CUDA {major} module of this site, "
        "and no other"
    )


@cache
def _looked_for(_device: int) -> list[str]:
    return missing_parts()
