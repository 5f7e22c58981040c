"""The order of work on a device: streams, events, and ranges that profilers show."""

from __future__ import annotations

from contextlib import contextmanager

from mpipipe.arrays.devices import cupy
from mpipipe.errors import BackendError

NOT_READY = 600  # cudaErrorNotReady


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
