"""The GPUs that this process sees, and the one door to CuPy: nothing else imports it."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpipipe.errors import BackendError

INSTALL = (
    "in a checkout of mpipipe `pip install '.[cuda13]'` (or [cuda12], as the driver has it: nvidia-smi tells; "
    "[rocm] for AMD's GPUs), "
    "or use device='cpu'"
)


@cache
def cupy() -> Any:
    """Return the module cupy, imported on first use.

    Returns
    -------
    module
        CuPy.

    Raises
    ------
    BackendError
        CuPy cannot be imported; the text has the remedy.
    """
    try:
        import cupy
    except Exception as error:  # a broken installation raises what it likes
        why = f"{type(error).__name__}: {error}"
        raise BackendError(f"a GPU was asked for, and CuPy cannot be imported ({why})", remedy=INSTALL) from None
    return cupy


def device_count() -> int:
    """Return the number of GPUs that this process sees.

    Returns
    -------
    int
        0 without CuPy or without a driver.
    """
    try:
        return cupy().cuda.runtime.getDeviceCount()
    except (BackendError, RuntimeError):
        return 0


def check_device(device: str) -> str:
    """Accept a device that exists.

    Parameters
    ----------
    device : str
        `"cpu"`; `"cuda"`, the current GPU of this process; `"cuda:1"`, which becomes the current one; or `"auto"`, the
        GPU where there is one.

    Returns
    -------
    str
        `"cpu"` or `"cuda"`.

    Raises
    ------
    BackendError
        The device is not there, or cannot be used. Nothing is simulated.

    Examples
    --------
    >>> from mpipipe import arrays
    >>> arrays.check_device("cpu")
    'cpu'
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


def _check_gpu() -> None:
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


def use_gpu(number: int) -> None:
    """Make a GPU the current one of this process.

    Parameters
    ----------
    number : int
        Number of the GPU, from 0.

    Raises
    ------
    BackendError
        There is no such GPU.
    """
    count = device_count()
    if not 0 <= number < count:
        raise BackendError("no such GPU", found=f"cuda:{number}", expected=f"cuda:0 ... cuda:{count - 1}")
    cupy().cuda.Device(number).use()


def current_gpu() -> int:
    """Return the number of the GPU that this process computes on now.

    Returns
    -------
    int
        From 0.

    Raises
    ------
    BackendError
        CuPy cannot be imported.
    """
    return cupy().cuda.runtime.getDevice()


def _architecture(properties: dict[str, Any]) -> str:
    """Return what the compiler calls this GPU: CuPy's properties of an AMD GPU have gcnArchName, gfx90a:sramecc+..."""
    gcn = properties.get("gcnArchName", b"")
    if cupy().cuda.runtime.is_hip and gcn:
        return f"AMD {(gcn.decode() if isinstance(gcn, bytes) else gcn).split(':')[0]}"
    return f"compute capability {properties['major']}.{properties['minor']}"


def describe_gpus() -> list[str]:
    """Describe each GPU that this process sees in one line: name, memory, compute capability or AMD's architecture.

    Returns
    -------
    list of str
        One line for each GPU; empty without CuPy or without a driver.
    """
    lines = []
    for number in range(device_count()):
        properties = cupy().cuda.runtime.getDeviceProperties(number)
        name = properties["name"].decode() if isinstance(properties["name"], bytes) else properties["name"]
        memory = f"{properties['totalGlobalMem'] / 2**30:.0f} GiB"
        lines.append(f"cuda:{number} {name}, {memory}, {_architecture(properties)}")
    return lines
