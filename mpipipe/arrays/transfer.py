"""Copies between host and device, through pinned memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import Array, DeviceArray, Event, is_device
from mpipipe.arrays.graphs import refuse_recording
from mpipipe.arrays.memory import address, empty
from mpipipe.arrays.streams import is_done, record, stream

# Pinned memory for one piece of an array; CuPy keeps what was pinned once.
PIECE_BYTES = 64 << 20


def pinned(nbytes: int) -> np.ndarray:
    """Return (nbytes,) uint8 of page-locked host memory, which the device copies by itself."""
    memory = cupy().cuda.alloc_pinned_memory(max(nbytes, 1))
    return np.frombuffer(memory, np.uint8, nbytes)


@cache
def _copies_under_way() -> tuple[deque[tuple[Event, np.ndarray]], threading.Lock]:
    """(event, buffer) of copies of all threads: CuPy would use a freed buffer at once."""
    return deque(), threading.Lock()


def _forget_ended_copies() -> None:
    underway, _ = _copies_under_way()
    while underway and is_done(underway[0][0]):
        underway.popleft()


def upload(host: ArrayLike, out: DeviceArray | None = None) -> DeviceArray:
    """Copy a host array to `out`, or to a new GPU array, in the order of the stream.

    The host array may change at once: it is copied to pinned memory first, which is kept until the
    device has read it. The host does not wait, except for the device to read all but the last two
    pieces of an array of more than `PIECE_BYTES`. `out` is C-contiguous, of the size and dtype of
    `host`.
    """
    host = np.asarray(host, order="C")
    if out is None:
        out = empty(host.shape, host.dtype, "cuda")
    content = host.reshape(-1).view(np.uint8)
    target = out.reshape(-1).view(np.uint8)
    underway, lock = _copies_under_way()
    with lock:
        _forget_ended_copies()
        for start in range(0, host.nbytes, PIECE_BYTES):
            if start >= 2 * PIECE_BYTES:
                underway[-2][0].synchronize()
                buffer = underway[-2][1]
                del underway[-2]
            else:
                buffer = pinned(min(PIECE_BYTES, host.nbytes - start))
            piece = content[start : start + PIECE_BYTES]
            buffer[: piece.size] = piece
            copy_to_device(target[start : start + PIECE_BYTES], buffer[: piece.size])
            underway.append((record(), buffer))
    return out


def download(*device_arrays: Array) -> Any:
    """Copy C-contiguous arrays to the host; return one array for one, else a list.

    Host arrays come back as they are.

    The host waits for the current stream: once, unless an array has more than `PIECE_BYTES`.
    """
    hosts = download_all(device_arrays)
    return hosts[0] if len(hosts) == 1 else hosts


def on_host(array: Array) -> np.ndarray:
    """Return an array on the host: itself if it is there, else a copy, whatever its strides."""
    if isinstance(array, np.ndarray):
        return array
    return download_all([array if array.flags.c_contiguous else array.copy()])[0]


def download_all(device_arrays: Sequence[Array]) -> list[np.ndarray]:
    """Copy any number of arrays to the host, as `download` does, and return a list."""
    results: list[np.ndarray] = list(device_arrays)
    short = {}
    for n, array in enumerate(device_arrays):
        if is_device(array) and array.nbytes <= PIECE_BYTES:
            short[n] = array
    if short:
        for n, host in zip(short, Download([*short.values()]).result()):
            results[n] = host
    for n, array in enumerate(device_arrays):
        if is_device(results[n]):  # longer ones, piece by piece
            results[n] = np.empty(array.shape, array.dtype)
            content = results[n].reshape(-1).view(np.uint8)
            start = 0
            for _, piece in host_pieces([array], PIECE_BYTES):
                content[start : start + piece.size] = piece
                start += piece.size
    return results


class Download:
    """Copies of C-contiguous device arrays to the host, begun in the order of the current stream.

    The device arrays may change once the stream has come to the copies.
    """

    def __init__(self, device_arrays: Sequence[DeviceArray]):
        self._copies = [(array, pinned(array.nbytes)) for array in device_arrays]
        for array, buffer in self._copies:
            if array.nbytes:
                copy_to_host(buffer, array.reshape(-1).view(np.uint8))
        self._done = record()
        underway, lock = _copies_under_way()
        with lock:
            _forget_ended_copies()
            underway += [(self._done, buffer) for _, buffer in self._copies]

    def is_done(self) -> bool:
        """Return whether `result` will not wait; never waits itself."""
        return is_done(self._done)

    def result(self) -> list[np.ndarray]:
        """Wait for the copies, and for no later work of the device; return new host arrays."""
        self._done.synchronize()
        return [
            buffer.copy().view(array.dtype).reshape(array.shape) for array, buffer in self._copies
        ]


def copy_to_device(target: DeviceArray, buffer: np.ndarray) -> None:
    """Start copying pinned bytes to a C-contiguous device array, in the stream's order.

    The bytes must stay as they are until the stream has come to the copy. A CUDA graph cannot
    record this: it would repeat the copy from memory that is no longer there.
    """
    refuse_recording("a copy to the device")
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(
        address(target), address(buffer), buffer.nbytes, runtime.memcpyHostToDevice, stream().ptr
    )


def copy_to_host(buffer: np.ndarray, source: DeviceArray) -> None:
    """Start copying a C-contiguous device array to pinned bytes, in the stream's order."""
    refuse_recording("a copy to the host")
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(
        address(buffer), address(source), buffer.nbytes, runtime.memcpyDeviceToHost, stream().ptr
    )


# -- The bytes of arrays as pieces in host memory, one after the other, for code that writes them --


# Pinned buffers: the caller looks at one, and the next piece is copied into the other.
DEPTH = 2
# Number, piece, its buffer, when it is there.
Copies: TypeAlias = "deque[tuple[int, np.ndarray, np.ndarray, Event]]"


def host_pieces(several: Iterable[Array], nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the array, bytes) in order, in pieces of at most `nbytes` in host memory.

    From a GPU each piece passes through one of two pinned buffers, in the order of the current
    stream: while the caller looks at one piece, the next one is copied. Pieces of a device array
    stay until the next iteration.
    """
    copies: Copies = deque()
    free: list[np.ndarray] = []
    try:
        for which, piece in _cut(several, nbytes):
            if isinstance(piece, np.ndarray):
                yield from _arrived(copies, free, leave=0)
                yield which, piece
                continue
            yield from _arrived(copies, free, leave=DEPTH - 1)
            buffer = free.pop() if free else pinned(nbytes)
            copy_to_host(buffer[: piece.size], piece)
            copies.append((which, buffer[: piece.size], buffer, record()))
        yield from _arrived(copies, free, leave=0)
    finally:
        # The caller may stop early: the device still writes to host memory that others would get.
        for *_, arrived in copies:
            arrived.synchronize()


def _cut(several: Iterable[Array], nbytes: int) -> Iterator[tuple[int, Array]]:
    for which, array in enumerate(several):
        if array.size:  # numpy has no bytes of an array without elements
            content = array.reshape(-1).view(np.uint8)
            for start in range(0, array.nbytes, nbytes):
                yield which, content[start : start + nbytes]


def _arrived(
    copies: Copies, free: list[np.ndarray], leave: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Wait for all but the newest `leave` copies; then the caller has used the buffer."""
    while len(copies) > leave:
        copies[0][3].synchronize()
        which, piece, buffer, _ = copies.popleft()
        yield which, piece
        free.append(buffer)
