"""CUDA graphs: device work that is recorded once, and then started by one call.

A recording notes every launch and every copy on the device with its addresses and numbers, and runs
nothing. So what is recorded must read and write the same memory in every run, and the host must not
wait for the device within.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import DeviceArray
from mpipipe.arrays.memory import memory_shortage
from mpipipe.arrays.streams import stream
from mpipipe.errors import BackendError

T = TypeVar("T")
# Recommended by cuBLAS's manual for Hopper, which needs most of all GPUs; others need 4 MiB.
WORKSPACE_BYTES = 32 << 20


class _Recording(threading.local):
    """What the graph that this thread records needs besides its own memory."""

    def __init__(self) -> None:
        self.alive: list | None = None  # things that the graph keeps alive; None: no graph
        # memory for libraries, by CuPy's module, GPU and stream; the graphs of one stream run one
        # by one
        self.workspaces: dict[tuple, DeviceArray] = {}


RECORDING = _Recording()


def keep_for_graph(thing: T) -> T:
    """Let a graph that is being recorded keep something alive, and return it.

    Call it with an array or a kernel from a cache that may drop it: a graph knows its address
    alone.
    """
    if RECORDING.alive is not None:
        RECORDING.alive.append(thing)
    return thing


def workspace() -> DeviceArray:
    """Return memory for a library within a recording; nothing in it lasts."""
    return keep_for_graph(RECORDING.workspaces[_place()])


def _place() -> tuple:
    return cupy(), cupy().cuda.runtime.getDevice(), stream().ptr


def _make_workspace() -> None:
    """Allocate it, outside of a recording: it is larger than most graphs, and no graph owns it."""
    place = _place()
    if place not in RECORDING.workspaces:
        RECORDING.workspaces[place] = cupy().empty((WORKSPACE_BYTES,), np.uint8)


def refuse_recording(what: str) -> None:
    """Raise BackendError, with `what` cannot be recorded, where this thread records a graph."""
    if RECORDING.alive is not None:
        raise BackendError(
            f"{what} while a CUDA graph is recorded",
            expected="work on the device alone",
            remedy="a layer that does this is not recordable: see nn.Layer",
        )


class Graph(NamedTuple):
    """Recorded work."""

    recorded: Any  # cupy.cuda.Graph
    memory: Any  # pool of the arrays that it makes; it alone writes there
    alive: list  # whatever else it uses that might be freed

    def launch(self) -> None:
        """Put the work on the current stream."""
        self.recorded.launch()


def record_graph(work: Callable[[], T]) -> tuple[Graph, T]:
    """Record what `work` puts on the stream, without running it; return (graph, result).

    `work` is called once, or twice where device memory runs out the first time. It has run before,
    so that it compiles and measures nothing now. Arrays of its result hold nothing before the first
    launch; each launch writes them. Raises what `work` raised, or CuPy's error where it did
    something that a recording does not allow.
    """
    try:
        return _record(work)
    except Exception as error:
        if memory_shortage(error) is None:
            raise
    # The graph has a pool of its own.
    cupy().get_default_memory_pool().free_all_blocks()
    return _record(work)


def _record(work: Callable[[], T]) -> tuple[Graph, T]:
    # shared, it might give one graph's results to another
    current = stream()
    memory = cupy().cuda.MemoryPool()
    alive: list = []
    _make_workspace()
    RECORDING.alive = alive
    try:
        with cupy().cuda.using_allocator(memory.malloc):
            current.begin_capture()
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # the recording is spoilt, and given up in any case
                    current.end_capture()
                raise
            return Graph(current.end_capture(), memory, alive), result
    finally:
        RECORDING.alive = None
