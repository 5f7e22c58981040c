"""cupy.cuda.Stream and Event on the queues of the emulated device."""

import time

from .machine import CUDARuntimeError, Machine, Recording, machine


def _local(home: Machine):
    if not hasattr(home.local, "streams"):
        home.local.streams = []
        home.local.current = Stream.null
    return home.local


class Stream:
    """One queue of the device. The null stream is a queue like any other: nothing waits for it by itself."""

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self._machine = machine()
        self.is_non_blocking = non_blocking
        self.queue = self._machine.queues[0] if null else self._machine.new_queue()

    @property
    def ptr(self) -> int:
        return self.queue.ptr

    def __eq__(self, other):
        return isinstance(other, Stream) and self.queue is other.queue

    def __hash__(self):
        return hash(self.queue.ptr)

    def __repr__(self):
        return f"<Stream {self.ptr:#x}>"

    def __del__(self):
        if getattr(self, "queue", None) is not None and self.queue.ptr:
            self._machine.queues.pop(self.queue.ptr, None)  # what is queued still runs; nothing more may come

    def synchronize(self):
        self._machine.count("Stream.synchronize")
        self._machine.advance(self.queue, self.queue.issued)

    @property
    def done(self) -> bool:
        return self._machine.glance(self.queue, self.queue.issued)

    def wait_event(self, event):
        if event.mark is not None:
            self._machine.put(self.queue, "wait for an event", after=event.mark)

    def begin_capture(self, mode=None):
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self._machine.amd:
            raise RuntimeError("streamBeginCapture is not supported in ROCm")
        if self.queue.recording is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is capturing already")
        self.queue.recording = Recording()

    def end_capture(self):
        recording, self.queue.recording = self.queue.recording, None
        if recording.spoilt:
            raise CUDARuntimeError(
                f"cudaErrorStreamCaptureInvalidated: an earlier call was refused: {recording.spoilt}"
            )
        return Graph(self._machine, recording.operations)

    def is_capturing(self) -> bool:
        return self.queue.recording is not None

    def __enter__(self):
        local = _local(self._machine)
        local.streams.append(local.current)
        local.current = self
        return self

    def __exit__(self, *error):
        local = _local(self._machine)
        local.current = local.streams.pop()


class Graph:
    """cupy.cuda.Graph: what was recorded, to be run again as it was, addresses included."""

    def __init__(self, home: Machine, operations: list):
        self._machine, self.operations = home, operations

    def launch(self, stream=None):
        queue = (get_current_stream() if stream is None else stream).queue
        self._machine.launch(queue, f"graph of {len(self.operations)}", lambda: None)
        for name, run in self.operations:
            self._machine.put(queue, name, run)


class _Null:
    """`Stream.null`: the null stream of the machine that is installed."""

    def __get__(self, instance, owner):
        home = machine()
        if not hasattr(home, "null_stream"):
            home.null_stream = Stream(null=True)
        return home.null_stream


Stream.null = _Null()


class Event:
    """A mark on a stream: `mark` is the queue and the position that it stands for."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._machine = machine()
        self.timed = not disable_timing
        self.mark = None
        self.time = None
        self.ptr = self._machine.number(self)

    def record(self, stream=None):
        stream = get_current_stream() if stream is None else stream
        if self._machine.broken:
            raise CUDARuntimeError("cudaErrorLaunchFailure: an earlier launch has failed")
        self.time = moment = []
        position = self._machine.put(stream.queue, "event", lambda: moment.append(time.perf_counter()))
        self.mark = (stream.queue, position)

    @property
    def done(self) -> bool:
        return self.mark is None or self._machine.glance(*self.mark)

    def synchronize(self):
        self._machine.count("Event.synchronize")
        if self.mark is not None:
            self._machine.advance(*self.mark)


Stream.__module__ = Event.__module__ = "cupy.cuda.stream"


def get_current_stream(device_id=-1) -> Stream:
    return _local(machine()).current


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events that are done."""
    if not (start_event.timed and end_event.timed) or None in (start_event.time, end_event.time):
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event without timing, or not recorded")
    if not (start_event.time and end_event.time):
        raise CUDARuntimeError("cudaErrorNotReady: device not ready")
    return (end_event.time[0] - start_event.time[0]) * 1e3
