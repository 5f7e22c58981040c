"""cupy.cuda.runtime and cupy.cuda.Device: copies that run late, and no way to wait for a whole device."""

import ctypes

from .machine import CUDARuntimeError, HiddenAccess, machine

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(1, 5)
CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14
is_hip = False

PROPERTIES = {"name": b"Emulated device", "multiProcessorCount": 132}
AMD_PROPERTIES = {"name": b"Emulated AMD device", "gcnArchName": b"gfx90a:sramecc+:xnack-", "multiProcessorCount": 110}


def getDeviceCount() -> int:
    if "driver" in machine().faults:
        text = "CUDA driver version is insufficient for CUDA runtime version"
        raise CUDARuntimeError(f"cudaErrorInsufficientDriver: {text}")
    return machine().devices


def getDevice() -> int:
    return getattr(machine().local, "device", 0)


def setDevice(device: int):
    if not 0 <= device < machine().devices:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    machine().local.device = device


def getDeviceProperties(device: int) -> dict:
    if not 0 <= device < machine().devices:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    major, minor = divmod(machine().capability, 10)
    facts = {**PROPERTIES, "totalGlobalMem": machine().memory, "major": major, "minor": minor}
    return {**facts, **(AMD_PROPERTIES if machine().amd else {}), "pciBusID": device + 1 + machine().first_bus}


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:{getDeviceProperties(device)['pciBusID']:02X}:00.0"


def runtimeGetVersion() -> int:
    return 13000


def eventQuery(event: int) -> int:
    """cudaSuccess, cudaErrorNotReady, or cudaErrorLaunchFailure for ever after something went wrong."""
    try:
        done = machine().events[event].done
    except CUDARuntimeError:
        return 719
    return 719 if machine().broken else 0 if done else 600


def memGetInfo() -> tuple[int, int]:
    return machine().memory - machine().used_bytes, machine().memory


def _integers(**arguments):
    for name, value in arguments.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int):
    """Queue a copy; host memory must be pinned, or the copy would wait."""
    _integers(dst=dst, src=src, size=size, kind=kind, stream=stream)
    home = machine()
    queue = home.queue_of(stream)
    device, pinned = home.device_ranges, home.pinned_ranges
    sides = {1: (device, pinned), 2: (pinned, device), 3: (device, device)}
    if kind not in sides:
        raise HiddenAccess(f"memcpyAsync of kind {kind}: say from where to where")
    if not size:
        return
    for ptr, ranges in zip((dst, src), sides[kind]):
        ranges.check(ptr, size)
    if queue.recording is not None and kind != memcpyDeviceToDevice:
        raise HiddenAccess("a copy from or to the host, in the recording of a graph: each replay would repeat it")
    home.cross({1: "to_device", 2: "to_host"}.get(kind), size)
    home.launch(queue, "memcpyAsync", lambda: ctypes.memmove(dst, src, size))


def memsetAsync(ptr: int, value: int, size: int, stream: int):
    _integers(ptr=ptr, value=value, size=size, stream=stream)
    home = machine()
    queue = home.queue_of(stream)
    if not size:
        return
    home.device_ranges.check(ptr, size)
    home.launch(queue, "memsetAsync", lambda: ctypes.memset(ptr, value, size))


class Device:
    """cupy.cuda.Device."""

    def __init__(self, device=None):
        self.id = getDevice() if device is None else int(device)

    def use(self):
        setDevice(self.id)

    @property
    def compute_capability(self) -> str:
        return str(machine().capability)


Device.__module__ = "cupy.cuda.device"
