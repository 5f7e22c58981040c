"""Device memory in the order of streams, and pinned memory, which its pool hands out again at once."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache

import numpy as np

from .machine import CUDARuntimeError, HiddenAccess, machine
from .streams import get_current_stream


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError, with its text."""

    def __init__(self, size: int, total: int, limit: int = 0):
        so_far = f"allocated so far: {total:,} bytes" + (f", limit set to: {limit:,} bytes" if limit else "")
        super().__init__(f"Out of memory allocating {size:,} bytes ({so_far}).")


class Memory:
    """A piece of device memory; freed with the last pointer to it, in the order of the stream that it came from.

    Made directly it is cudaMalloc's: cudaFree waits for the device, which counts as a synchronisation.
    """

    _pool: MemoryPool | None = None

    def __init__(self, size: int):
        self.ptr, self.size, pool = 0, int(size), self._pool
        if self.size < 0:
            raise CUDARuntimeError(f"cudaErrorInvalidValue: memory of {size} bytes")
        self.home = machine()
        self.device_id = getattr(self.home.local, "device", 0)
        self._queue = get_current_stream().queue
        self._recording = self._queue.recording
        if not self.size:
            return
        if self._recording is not None and pool is self.home.pool:
            raise HiddenAccess("memory of the pool that everybody uses, in the recording of a graph")
        limit = 0 if pool is None else pool.get_limit()
        if self.home.used_bytes + self.size > (limit or self.home.memory):
            raise OutOfMemoryError(self.size, self.home.used_bytes, limit)
        self._key = self.device_id, self._queue.ptr, pool
        self._block = self.home.take(self._key, self.size)
        self.ptr = self._block.address
        if self._recording is not None:  # each replay begins with what the one before has left there
            self._recording.operations.append(("alloc", self._block.poison))
        self.home.device_ranges.add(self.ptr, self.size)
        self.home.used_bytes += self.size

    @property
    def _storage(self) -> np.ndarray:
        return self._block.bytes[: self.size] if self.size else np.empty(0, np.uint8)

    def __del__(self):
        if not getattr(self, "ptr", 0):
            return
        home, block, used = self.home, self._block, self.size
        with home.lock:
            home.device_ranges.remove(self.ptr)
            home.used_bytes -= self.size
            if self._pool is None:
                home.count("cudaFree")
                home.drain()
            recording, self._queue.recording = self._queue.recording, None
            if recording is not None and recording is self._recording:
                recording.operations.append(("free", lambda: home.poison(block, used)))  # in every replay
            else:
                home.put(self._queue, "free", lambda: home.poison(block, used))
            self._queue.recording = recording
            home.give(self._key, block)


class PooledMemory(Memory):
    """Memory of a pool: freed without waiting."""

    def __init__(self, size: int, pool: MemoryPool):
        self._pool = pool
        super().__init__(size)


class MemoryPointer:
    """A place in a piece of memory."""

    def __init__(self, mem: Memory, offset: int):
        self.mem = mem
        self.ptr = mem.ptr + offset if mem.ptr else 0

    @property
    def device_id(self):
        return self.mem.device_id

    def __int__(self):
        return self.ptr

    def __index__(self):
        raise HiddenAccess("a MemoryPointer is no integer: take its ptr")

    def __add__(self, offset: int):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__


OutOfMemoryError.__module__ = MemoryPointer.__module__ = Memory.__module__ = PooledMemory.__module__ = (
    "cupy.cuda.memory"
)


class MemoryPool:
    """cupy.cuda.MemoryPool, as far as one asks it for memory and for its size."""

    def __init__(self, allocator=None):
        self._limit = 0

    def get_limit(self) -> int:
        """The most bytes that it may hold, 0 without a limit."""
        return self._limit

    def set_limit(self, size=None, fraction=None):
        self._limit = int(size)

    def malloc(self, size: int) -> MemoryPointer:
        return MemoryPointer(PooledMemory(size, self), 0)

    def used_bytes(self) -> int:
        return machine().used_bytes

    def total_bytes(self) -> int:
        return machine().used_bytes

    def free_bytes(self) -> int:
        return 0  # memGetInfo counts what is free already

    def free_all_blocks(self, stream=None):
        machine().count("MemoryPool.free_all_blocks")


class MemoryAsyncPool(MemoryPool):
    """The name of CuPy's pool over cudaMallocAsync, whose memory must not go to MPI."""

    def __init__(self, pool_handles="current"):
        super().__init__()


MemoryPool.__module__ = MemoryAsyncPool.__module__ = "cupy.cuda.memory"


def get_default_memory_pool() -> MemoryPool:
    home = machine()
    if home.pool is None:
        home.pool = MemoryPool()
    return home.pool


def get_allocator():
    home = machine()
    return getattr(home.local, "allocator", None) or home.allocator or get_default_memory_pool().malloc


def set_allocator(allocator=None):
    machine().allocator = allocator


@contextmanager
def using_allocator(allocator=None):
    """Within, this thread's new arrays come from there."""
    local = machine().local
    before, local.allocator = getattr(local, "allocator", None), allocator
    try:
        yield
    finally:
        local.allocator = before


def alloc(size: int) -> MemoryPointer:
    return get_allocator()(size)


# -- pinned memory


@cache
def _pinned_type(size: int):
    def release(self):
        home, block = self.home, self.block
        with home.lock:
            home.pinned_ranges.remove(self.ptr)
            block.poison()  # at once: the next one who asks gets it and writes to it
            home.give("pinned", block)

    return type("PinnedMemoryPointer", (ctypes.c_ubyte * size,), {"__del__": release, "size": lambda self: size})


def alloc_pinned_memory(size: int):
    """An object with the buffer protocol, as long as the next power of two."""
    size = max(512, 1 << max(size - 1, 0).bit_length())
    home = machine()
    with home.lock:
        block = home.take("pinned", size)
        pointer = _pinned_type(size).from_buffer(block.bytes)
        pointer.home, pointer.block, pointer.ptr = home, block, block.address
        home.pinned_ranges.add(block.address, size)
    return pointer


def view_of(ptr: int, nbytes: int) -> np.ndarray:
    """The bytes at an address."""
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(ptr), np.uint8) if nbytes else np.empty(0, np.uint8)
