"""The GPUs that this process sees, and the one door to CuPy: nothing else imports it."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpipipe.errors import BackendError

INSTALL = (
    "in a checkout of mpipipe `pip install '.[cuda13]'` (or [cuda12], as the driver has it: nvidia-smi tells), "
    "or use device='cpu'"
)


@cache
def cupy() -> Any:
    """The module cupy. Raises BackendError with the remedy where it is missing."""
    try:
        import cupy
    except Exception as error:  # a broken installation raises what it likes
        why = f"{type(error).__name__}: {error}"
        raise BackendError(f"a GPU was asked for, and CuPy cannot be imported ({why})", remedy=INSTALL) from None
    return cupy


def device_count() -> int:
    """Number of GPUs that this process sees; 0 without CuPy or without a driver."""
    try:
        return cupy().cuda.runtime.getDeviceCount()
    except (BackendError, RuntimeError):
        return 0


def check_device(device: str) -> str:
    """Accept a device that exists, and return "cpu" or "cuda".

    Parameters
    ----------
    device : "cpu"; "cuda", the process's current GPU; "cuda:1", which becomes the current one; or "auto", the GPU where
        there is one

    Raises BackendError for what is not there: nothing is simulated.
    """
    name, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if name not in ("cpu", "cuda", "auto") or (colon and (name != "cuda" or not number.isdigit())):
        raise BackendError("unknown device", found=repr(device), expected="'cpu', 'cuda', 'cuda:N' or 'auto'")
    if name == "auto":
        name = "cuda" if device_count() else "cpu"
    if name == "cuda":
        _check_gpu()
        if number:
            use_gpu(int(number))
    return name


def _check_gpu():
    library = cupy()
    try:
        count = library.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise BackendError(
            f"device 'cuda' was asked for, and no GPU can be used ({error})",
            remedy="run on a node with an NVIDIA GPU and its driver (nvidia-smi must answer), or use device='cpu'",
        ) from None
    if count == 0:
        raise BackendError(
            "device 'cuda' was asked for, and this process sees no GPU",
            found="0 GPUs",
            remedy="ask the batch system for GPUs (--gpus-per-node), look at CUDA_VISIBLE_DEVICES, or use device='cpu'",
        )


def use_gpu(number: int):
    """Make GPU `number` the current one of this process."""
    count = device_count()
    if not 0 <= number < count:
        raise BackendError("no such GPU", found=f"cuda:{number}", expected=f"cuda:0 ... cuda:{count - 1}")
    cupy().cuda.Device(number).use()


def current_gpu() -> int:
    """Number of the GPU that this process computes on now."""
    return cupy().cuda.runtime.getDevice()


def describe_gpus() -> list[str]:
    """One line for each GPU that this process sees: name, memory, compute capability."""
    lines = []
    for number in range(device_count()):
        facts = cupy().cuda.runtime.getDeviceProperties(number)
        name = facts["name"].decode() if isinstance(facts["name"], bytes) else facts["name"]
        memory = f"{facts['totalGlobalMem'] / 2**30:.0f} GiB"
        lines.append(f"cuda:{number} {name}, {memory}, compute capability {facts['major']}.{facts['minor']}")
    return lines
