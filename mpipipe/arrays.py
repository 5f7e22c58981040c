"""The one door to array libraries: numpy on the host, CuPy on a GPU.

Nothing else imports cupy, and this module does so only when a device is asked for, so that everything works without it.
Code above asks here for memory, copies, dtypes by name, streams, events and compiled CUDA functions. Of CuPy's many
functions only memory, views, streams, events, the compiler and cuBLAS are used: what computes on the device is source
in this package, and nothing here waits for the device unless its name says so (`download`, `synchronize`).

Device work is in the order of CuPy's current stream of the calling thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.errors import ArgumentError, BackendError

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register
HALVES = ("float16", "bfloat16")
NOT_READY = 600  # cudaErrorNotReady
PIECE_BYTES = 64 << 20  # of pinned memory for one piece of an array; CuPy keeps what was pinned once
INSTALL = "pip install 'mpipipe[cuda13]' (or [cuda12], as the driver has it: nvidia-smi tells), or use device='cpu'"


# -- which array, which dtype -----------------------------------------------------------------------------------------


def is_device(array) -> bool:
    """Whether this is an array in the memory of a GPU."""
    return type(array).__module__.split(".")[0] == "cupy" and hasattr(array, "data")


def is_array(array) -> bool:
    """Whether this is an array of either library."""
    return isinstance(array, np.ndarray) or is_device(array)


def device_of(array) -> str:
    """ "cpu" or "cuda"; raises ArgumentError for anything but an array."""
    if isinstance(array, np.ndarray):
        return "cpu"
    if is_device(array):
        return "cuda"
    raise ArgumentError(
        "not an array",
        found=type(array).__name__,
        expected="numpy.ndarray or cupy.ndarray",
        remedy="convert it with numpy.asarray or cupy.asarray first; nothing is converted silently",
    )


def plain(array):
    """A host array of a subclass of numpy.ndarray (memmap, matrix, ...) as an ndarray itself, without a copy.

    Other arrays as they are. Raises ArgumentError for a masked array.
    """
    refuse_mask(array)
    return array.view(np.ndarray) if isinstance(array, np.ndarray) and type(array) is not np.ndarray else array


def refuse_mask(array):
    """Raise ArgumentError for a masked array: nothing here would look at its mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            "a masked array, whose mask would be lost", found=f"{array.dtype.name}{list(array.shape)}, masked",
            expected="numpy.ndarray", remedy="fill in what is masked with x.filled(value), or take x.data",
        )


def namespace(array):
    """The library that made `array`, numpy or cupy; raises ArgumentError for anything else."""
    return np if device_of(array) == "cpu" else cupy()


def dtype(name) -> np.dtype:
    """The numpy dtype called `name`, bfloat16 included."""
    try:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)
    except TypeError:
        raise ArgumentError("unknown dtype", found=repr(name), expected="float32, float64, bfloat16, ...") from None


def is_floating(kind: np.dtype) -> bool:
    """Whether gradients exist for arrays of this dtype (bfloat16 reports kind 'V')."""
    return kind.kind in "fc" or kind.name == "bfloat16"


def is_half(kind: np.dtype) -> bool:
    """Whether this is float16 or bfloat16."""
    return kind.name in HALVES


def accumulator(kind: np.dtype) -> np.dtype:
    """The dtype in which values of dtype `kind` are summed and parameters are kept: float32 for the half types."""
    return np.dtype(np.float32) if is_half(kind) else kind


# -- devices ----------------------------------------------------------------------------------------------------------


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
        raise BackendError(
            "unknown device", found=repr(device), expected="'cpu', 'cuda', 'cuda:N' or 'auto'"
        )
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


# -- memory -----------------------------------------------------------------------------------------------------------


def aligned_empty(shape, kind: np.dtype) -> np.ndarray:
    """Uninitialised C-contiguous host array that starts on a cache line."""
    kind = np.dtype(kind)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for extent in shape:
        count *= extent
    raw = np.empty(count * kind.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count * kind.itemsize].view(kind).reshape(shape)


def aligned_zeros(shape, kind: np.dtype) -> np.ndarray:
    """As aligned_empty, filled with zeros."""
    array = aligned_empty(shape, kind)
    array.fill(0)
    return array


def empty(shape, kind: np.dtype, device: str = "cpu"):
    """Uninitialised C-contiguous array on `device`; on a GPU from CuPy's pool, in the order of the current stream."""
    if device == "cpu":
        return aligned_empty(shape, kind)
    return cupy().empty(shape, kind)


def zeros(shape, kind: np.dtype, device: str = "cpu"):
    """As `empty`, filled with zeros."""
    array = empty(shape, kind, device)
    set_zero(array)
    return array


def empty_like(array, kind: np.dtype | None = None):
    """Uninitialised C-contiguous array of the same shape on the same device."""
    return empty(array.shape, array.dtype if kind is None else kind, device_of(array))


def set_zero(array):
    """Fill a C-contiguous array with zeros."""
    if isinstance(array, np.ndarray):
        array.fill(0)
    elif array.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memsetAsync(array.data.ptr, 0, array.nbytes, stream().ptr)


def copy_into(target, source):
    """Copy `source` to `target`, both C-contiguous, of one dtype and size, on one device."""
    if target.dtype != source.dtype or target.size != source.size:
        found, expected = (f"{array.dtype}{list(array.shape)}" for array in (source, target))
        raise ArgumentError("a copy to another kind of array", found=found, expected=expected)
    if isinstance(target, np.ndarray):
        target[...] = source
    elif source.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(
            target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, stream().ptr
        )


def copy(array):
    """A copy of an array on the same device."""
    if isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        return array.copy()
    new = empty_like(array)
    copy_into(new, array)
    return new


def concatenate(parts: Sequence):
    """C-contiguous arrays of one dtype and device, put together along axis 0."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    whole = empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype, "cuda")
    start = 0
    for part in parts:
        copy_into(whole[start : start + part.shape[0]], part)
        start += part.shape[0]
    return whole


def address(array) -> int:
    """Where the first element lies, in host or device memory."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def shares_memory(first, second) -> bool:
    """Whether two arrays may overlap; exact for C-contiguous device arrays."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and np.may_share_memory(first, second)
    (low, high), (start, end) = _bounds(first), _bounds(second)
    return low < end and start < high


def _bounds(array) -> tuple[int, int]:
    if array.size == 0:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides)]
    low = array.data.ptr + sum(step for step in reach if step < 0)
    return low, array.data.ptr + sum(step for step in reach if step > 0) + array.itemsize


# -- between host and device ------------------------------------------------------------------------------------------


def pinned(nbytes: int) -> np.ndarray:
    """Page-locked host memory as an array of bytes, which the device copies to and from without the processor."""
    memory = cupy().cuda.alloc_pinned_memory(max(nbytes, 1))
    return np.frombuffer(memory, np.uint8, nbytes)


@cache
def _uploads() -> tuple[deque, threading.Lock]:
    """(event, page) of uploads under way, from all threads: CuPy hands a freed page out again at once."""
    return deque(), threading.Lock()


def upload(host: np.ndarray, out=None):
    """A device array with the values of a host array, in the order of the current stream.

    The host array may change at once: it is copied to pinned memory first, which is kept until the device has read it.
    Does not wait, but for all pieces except the last two of an array of more than `PIECE_BYTES`.
    """
    host = np.asarray(host, order="C")
    array = empty(host.shape, host.dtype, "cuda") if out is None else out
    content, target = host.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8)
    underway, lock = _uploads()
    with lock:
        while underway and is_done(underway[0][0]):
            underway.popleft()
        for start in range(0, host.nbytes, PIECE_BYTES):
            if start >= 2 * PIECE_BYTES:
                underway[-2][0].synchronize()
                page = underway[-2][1]
                del underway[-2]
            else:
                page = pinned(min(PIECE_BYTES, host.nbytes - start))
            piece = content[start : start + PIECE_BYTES]
            page[: piece.size] = piece
            copy_to_device(target[start : start + PIECE_BYTES], page[: piece.size])
            underway.append((record(), page))
    return array


def download(*device_arrays):
    """Host copies of C-contiguous device arrays: one array for one, a list for several. Waits for the stream.

    Once, unless an array has more than `PIECE_BYTES`. Host arrays come back as they are.
    """
    results: list = []
    waiting = []
    for array in device_arrays:
        if isinstance(array, np.ndarray):
            results.append(array)
            continue
        host = np.empty(array.shape, array.dtype)
        results.append(host)
        content, source = host.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8)
        for start in range(0, array.nbytes, PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            page = pinned(piece.size)
            copy_to_host(page, source[start : start + PIECE_BYTES])
            waiting.append((piece, page))
            if array.nbytes > PIECE_BYTES:
                _receive(waiting)
    _receive(waiting)
    return results[0] if len(results) == 1 else results


def _receive(waiting):
    if waiting:
        stream().synchronize()
    for piece, page in waiting:
        piece[...] = page
    waiting.clear()


def copy_to_device(target, page: np.ndarray):
    """Start copying pinned bytes to a contiguous device array; `page` must stay as it is until the stream is there."""
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(address(target), address(page), page.nbytes, runtime.memcpyHostToDevice, stream().ptr)


def copy_to_host(page: np.ndarray, source):
    """Start copying a contiguous device array to pinned bytes, which are there once the stream is."""
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(address(page), address(source), page.nbytes, runtime.memcpyDeviceToHost, stream().ptr)


# -- order of work ----------------------------------------------------------------------------------------------------


def stream():
    """The current stream of this thread."""
    return cupy().cuda.get_current_stream()


def side_stream():
    """A new stream that no other waits for; `with` makes it the current one."""
    return cupy().cuda.Stream(non_blocking=True)


def record(timing: bool = False):
    """An event behind all work put on the current stream so far: for `is_done`, `wait_for`, and its `synchronize()`."""
    event = cupy().cuda.Event(disable_timing=not timing)
    event.record(stream())
    return event


def is_done(event) -> bool:
    """Whether the device has come to an event; raises BackendError where it has failed, and never will."""
    runtime = cupy().cuda.runtime
    status = runtime.eventQuery(event.ptr)  # Event.done is False for ever after a failure
    if status in (0, NOT_READY):
        return status == 0
    raise BackendError(
        f"work on the GPU has failed ({runtime.CUDARuntimeError(status)})",
        remedy="an earlier kernel is the cause: compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, tells which",
    )


def wait_for(event):
    """Let later work on the current stream wait for an event; the host does not wait."""
    stream().wait_event(event)


def seconds_between(start, end) -> float:
    """Device time between two timed events that are done."""
    return cupy().cuda.get_elapsed_time(start, end) * 1e-3


@contextmanager
def annotated(name: str):
    """Show what is done within as a range called `name` in NVIDIA's profilers."""
    nvtx = cupy().cuda.nvtx
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()


# -- functions for the device -----------------------------------------------------------------------------------------

COMMON = Path(__file__).parent / "common.cuh"  # goes before every source
C_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "int32": "int",
    "int64": "long long",
}


@cache
def _module(path: Path, constants: tuple, _device: int):
    # not by #include and -D: CuPy's cache of compiled code does not look into included files, and macros reach headers
    code = "\n".join([COMMON.read_text(), *cuda_source_facts(dict(constants)), path.read_text()])
    return cupy().RawModule(code=code, options=("--std=c++17",), backend="nvrtc")


@cache
def _function(path: Path, name: str, constants: tuple, device: int):
    return _module(path, constants, device).get_function(name)


def cuda_source_facts(constants: dict) -> tuple[str, ...]:
    """C++ declarations of the constants that `cuda_function` takes."""
    return tuple(
        f"typedef {C_TYPES[value.name]} {name};" if isinstance(value, np.dtype) else f"constexpr int {name} = {value};"
        for name, value in constants.items()
    )


def cuda_function(path: Path, name: str, **constants):
    """The `extern "C"` function `name` of a CUDA source file, compiled once for the current GPU and these constants.

    A numpy dtype declares a type of that name in front of the source (T=array.dtype), an integer a constexpr int. Call
    the result with (grid, block, arguments), or (grid, block, arguments, bytes of dynamic shared memory): tuples of
    integers, and a tuple of arrays and numpy scalars, whose dtypes must be the C types of the parameters.
    """
    return _function(path, name, tuple(constants.items()), cupy().cuda.runtime.getDevice())
