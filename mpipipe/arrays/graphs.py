"""CUDA graphs: device work that is recorded once, and then started by one call as often as one likes.

A recording notes every launch and every copy on the device with its addresses and numbers, and runs none of them. So
what is recorded must read and write the same memory in every run, and the host must not wait for the device within.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from mpipipe.arrays import platform
from mpipipe.arrays.devices import cupy
from mpipipe.arrays.shortage import memory_shortage
from mpipipe.arrays.streams import stream
from mpipipe.arrays.types import DeviceArray
from mpipipe.errors import BackendError

T = TypeVar("T")
A = TypeVar("A", bound=DeviceArray)


class _Recording(threading.local):
    """What the graph that this thread records needs besides its own memory."""

    def __init__(self) -> None:
        self.held: list[DeviceArray] | None = None


_recording = _Recording()


def hold(array: A) -> A:
    """Let a graph that is being recorded keep an array alive; elsewhere this does nothing.

    Whoever takes an array from a cache that may drop it calls this: a graph knows the address alone.

    Parameters
    ----------
    array : cupy.ndarray
        Any array.

    Returns
    -------
    cupy.ndarray
        The same array.
    """
    if _recording.held is not None:
        _recording.held.append(array)
    return array


def refuse_recording(what: str) -> None:
    """Raise where this thread records a graph.

    Parameters
    ----------
    what : str
        What cannot be recorded.

    Raises
    ------
    BackendError
        A recording is under way.
    """
    if _recording.held is not None:
        raise BackendError(
            f"{what} while a CUDA graph is recorded",
            expected="work on the device alone",
            remedy="a layer that does this is not recordable: see nn.Layer",
        )


class Graph(NamedTuple):
    """Recorded work.

    Attributes
    ----------
    recorded : cupy.cuda.Graph
        The work itself.
    memory : cupy.cuda.MemoryPool
        Where the arrays lie that it makes; it alone writes there.
    held : list of cupy.ndarray
        Other arrays that it uses, which might be freed.
    """

    recorded: Any
    memory: Any
    held: list[DeviceArray]

    def launch(self) -> None:
        """Put the work on the current stream."""
        self.recorded.launch()


def graphs_refused() -> str:
    """Return why graphs cannot be recorded on the current stream, or "" where they can.

    Returns
    -------
    str
        A reason in words.
    """
    if platform.is_amd():
        return "CuPy records no graphs on AMD's GPUs"
    if not stream().ptr:
        return "the work goes to the null stream, which records no graphs (enter arrays.own_stream())"
    return ""


def record_graph(work: Callable[[], T]) -> tuple[Graph, T]:
    """Record what a function puts on the current stream; nothing of it runs before the graph is launched.

    Parameters
    ----------
    work : callable
        Called once, or twice where device memory runs out the first time. It has run before, so that it compiles and
        measures nothing now.

    Returns
    -------
    graph : Graph
        The work.
    result : object
        What the function returned. Its arrays hold nothing before the first launch; each launch writes them.

    Raises
    ------
    Exception
        What the function raised, or CuPy's error where it did what a recording does not allow.
    """
    try:
        return _record(work)
    except Exception as error:
        if memory_shortage(error) is None:
            raise
    cupy().get_default_memory_pool().free_all_blocks()  # of another pool than that of the graph
    return _record(work)


def _record(work: Callable[[], T]) -> tuple[Graph, T]:
    current, memory = stream(), cupy().cuda.MemoryPool()  # shared, it might give one graph's results to another
    held: list[DeviceArray] = []
    _recording.held = held
    try:
        with cupy().cuda.using_allocator(memory.malloc):
            current.begin_capture()
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # of a recording that is spoilt; this one is given up in any case
                    current.end_capture()
                raise
            return Graph(current.end_capture(), memory, held), result
    finally:
        _recording.held = None
