"""Copies between host and device, through pinned memory."""

from __future__ import annotations

import threading
from collections import deque
from functools import cache

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.memory import address, empty
from mpipipe.arrays.streams import is_done, record, stream

PIECE_BYTES = 64 << 20  # of pinned memory for one piece of an array; CuPy keeps what was pinned once


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
