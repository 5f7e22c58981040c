"""The order of work on a device: streams, events, and ranges that profilers show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import Event, Stream
from mpipipe.errors import BackendError

NOT_READY = 600  # cudaErrorNotReady


def stream() -> Stream:
    """Return CuPy's current stream of this thread."""
    return cupy().cuda.get_current_stream()


def side_stream() -> Stream:
    """Return a new stream that no other waits for; `with` makes it the current one."""
    return cupy().cuda.Stream(non_blocking=True)


# `made`: a thread's own streams by library and GPU; all are kept, as CuPy's memory by stream.
_own = threading.local()


@contextmanager
def own_stream(device: str = "cuda") -> Iterator[None]:
    """Send device work within to a stream of this thread's; choose the GPU before.

    CuPy's default is the null stream, which waits for the work of every blocking stream of the
    process, as they do for its. This stream waits for no other, and no other for it, except at its
    ends: work before the block comes before work within, and that before work after the block.
    """
    if device == "cpu":
        yield
        return
    key = cupy(), cupy().cuda.runtime.getDevice()
    made: dict[tuple, Stream] = _own.__dict__.setdefault("made", {})
    if key not in made:
        made[key] = side_stream()
    before = stream()
    new = made[key]
    new.wait_event(record())
    with new:
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the GPU has failed; the error says in what
                before.wait_event(record())
            raise
        before.wait_event(record())


def record(timing: bool = False) -> Event:
    """Record an event after all work on the current stream; `timing` for `seconds_between`."""
    event = cupy().cuda.Event(disable_timing=not timing)
    event.record(stream())
    return event


def is_done(event: Event) -> bool:
    """Return whether the device has reached an event; BackendError if it has failed."""
    runtime = cupy().cuda.runtime
    status = runtime.eventQuery(event.ptr)  # Event.done is False for ever after a failure
    if status in (0, NOT_READY):
        return bool(status == 0)
    raise BackendError(
        f"work on the GPU has failed ({runtime.CUDARuntimeError(status)})",
        remedy="an earlier kernel is the cause: compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, "
        "tells which",
    )


def wait_for(event: Event) -> None:
    """Let later work on the current stream wait for an event; the host does not wait."""
    stream().wait_event(event)


def seconds_between(start: Event, end: Event) -> float:
    """Return the device time between two events that are done, recorded with timing=True."""
    return float(cupy().cuda.get_elapsed_time(start, end)) * 1e-3
