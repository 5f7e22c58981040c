"""The emulated device: queues of operations that run late, and memory that turns to NaN when it is freed.

An operation put on a stream runs only when something forces it: a synchronisation runs what it needs and no more. A
query (`done`) lets the stream go on by a few operations, so that polling ends. With a seed other than 0 the device
also works by itself now and then, so that different seeds show different orders of the streams.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

ALIGNMENT = 512  # bytes, as CuPy's pool
GUARD = 512  # bytes of poison on both sides of an allocation
POISON = 0xFF  # as float32, float64, float16 or bfloat16: NaN


class HiddenAccess(AssertionError):
    """The host looked at device memory or computed with it, which on a GPU waits, or is no kernel of this package."""


class NotEmulatedError(HiddenAccess, AttributeError):
    """A part of CuPy that this package does not use."""


class CUDARuntimeError(RuntimeError):
    """What the CUDA runtime refuses, as cupy.cuda.runtime.CUDARuntimeError."""


class DeviceHangError(AssertionError):
    """The host waits for work on the device that will never end, because another rank does not do its part."""


@dataclass
class Operation:
    """One thing on a stream: a computation, the wait for a position on another stream, or a kernel that meets a peer.

    number : place in the order in which the host issued all operations of the device
    meets : asked again and again once the operation has begun; true when the other ranks have done their part
    """

    name: str
    run: Callable[[], None] | None = None
    after: tuple[Queue, int] | None = None
    number: int = 0
    meets: Callable[[], bool] | None = None
    begun: bool = False


class Recording:
    """What is put on a stream while a graph is recorded there; none of it runs.

    spoilt : what the program did that a recording does not allow; such a recording ends without a graph
    """

    def __init__(self):
        self.operations: list[tuple[str, Callable[[], None]]] = []
        self.spoilt = ""


class Queue:
    """The operations of one stream, in order; positions count from 1."""

    def __init__(self, ptr: int):
        self.ptr = ptr
        self.operations: deque[Operation] = deque()
        self.issued = 0
        self.finished = 0
        self.recording: Recording | None = None  # while a graph is recorded here


class Block:
    """Raw memory with guards; it lives as long as the machine, whoever frees it, so that a stray use reads poison."""

    def __init__(self, nbytes: int):
        self.nbytes, self.used = nbytes, 0
        self.storage = np.full(nbytes + 2 * GUARD + ALIGNMENT, POISON, np.uint8)
        self._start = GUARD + -(self.storage.ctypes.data + GUARD) % ALIGNMENT
        self.bytes = self.storage[self._start : self._start + nbytes]
        self.address = self.storage.ctypes.data + self._start

    def poison(self):
        """NaN everywhere, guards included."""
        self.storage.fill(POISON)

    def overrun(self, used: int) -> bool:
        """Whether something was written outside of the first `used` bytes."""
        start, end = self._start, self._start + self.nbytes + GUARD
        before, behind = self.storage[start - GUARD : start], self.storage[start + used : end]
        return bool((before != POISON).any() or (behind != POISON).any())


class Ranges:
    """Live pieces of memory by address."""

    def __init__(self, what: str):
        self.what = what
        self._lock = threading.RLock()  # a piece can be freed, by the collector of garbage, within any of these
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._removed = 0  # pieces so far

    def add(self, start: int, nbytes: int):
        with self._lock:
            insort(self._starts, start)
            self._ends[start] = start + nbytes

    def remove(self, start: int):
        with self._lock:
            self._removed += 1
            self._starts.remove(start)  # in one go: the collector may move others between a search and a removal
            del self._ends[start]

    def check(self, ptr: int, nbytes: int):
        """Raise unless the `nbytes` from `ptr` on lie in one live piece."""
        with self._lock:
            removed = -1
            while removed != self._removed:  # the collector may free another piece between two lines
                removed = self._removed
                position = bisect_right(self._starts, ptr)
                start = max(self._starts[position - 1 : position], default=None)
                inside = ptr + nbytes <= self._ends.get(start, 0)
        if not inside:
            raise CUDARuntimeError(
                f"cudaErrorInvalidValue: {nbytes} bytes from {ptr:#x} are not in live {self.what} memory"
                + (" (invalid device pointer)" if self.what == "device" else "")
            )


FAULTS = {
    "driver": "the driver is missing",
    "compiler": "NVRTC is not found",
    "headers": "CUDA's headers are not found",
    "cublas": "cuBLAS is not found",
    "libcudart": "the CUDA runtime library is not found, not even in pip packages",
    "cudnn": "cuDNN's Python package finds no library",
    "two cudas": "NVRTC and the CUDA runtime of another version come first",
}


class Machine:
    """All state of the emulated devices of one process.

    What a test may change before the package looks at it:

    faults : what of FAULTS is wrong with this machine
    capability : compute capability of all devices, ten times the major number plus the minor one
    memory : bytes of each device
    """

    def __init__(self, seed: int = 0, devices: int = 1, faults=(), memory: int = 1 << 34, amd: bool = False):
        self.amd = amd
        self.faults, self.capability, self.memory = set(faults), 90, memory
        assert self.faults <= set(FAULTS), f"no fault of an emulated machine among {self.faults}"
        self.lock = threading.RLock()
        self.local = threading.local()
        self.random = random.Random(seed)
        self.background = 0.2 if seed else 0.0
        self.devices = devices
        self.queues = {0: Queue(0)}
        self.all_queues = [self.queues[0]]
        self.device_ranges, self.pinned_ranges = Ranges("device"), Ranges("pinned")
        self.free_blocks: dict[tuple, list[Block]] = {}
        self.blocks: list[Block] = []
        self.events: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self.synchronisations: list[str] = []
        self.launches: list[str] = []
        self.null_launches: list[str] = []  # those on the null stream
        self.crossed = {"to_device": 0, "to_host": 0}
        self.errors: list[str] = []
        self.broken = False
        self.number_issued = 0
        self.one_queue = False  # whether all streams share one queue in hardware: see _advance_in_issue_order
        self.first_bus = 0  # bus number of device 0: ranks with different ones have GPUs of their own
        self.patience = 60.0  # seconds that the host waits for a peer's part before that counts as a hang
        self.communicators: list = []  # of NCCL, of this rank
        self.used_bytes = 0
        self.refused: list[str] = []  # what a library said besides its status
        self.cublas_workspace: tuple[int, int] | None = None  # address and bytes that cuBLAS was given
        self.pool = self.allocator = None  # CuPy's default pool, and what the program has put in its place

    # -- streams

    def new_queue(self) -> Queue:
        with self.lock:
            queue = Queue(next(_handles))
            self.queues[queue.ptr] = queue
            self.all_queues.append(queue)
            return queue

    def number(self, event) -> int:
        """A handle for an event."""
        handle = next(_handles)
        self.events[handle] = event
        return handle

    def queue_of(self, ptr: int) -> Queue:
        if not isinstance(ptr, int) or ptr not in self.queues:
            raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: no stream {ptr!r}")
        return self.queues[ptr]

    def put(self, queue: Queue, name: str, run=None, after=None, meets=None) -> int:
        """Queue an operation, and return its position."""
        if queue.recording is not None:
            if run is None or meets is not None or name == "event":
                self.spoil(queue, f"{name}: what happens outside of a recording")
            queue.recording.operations.append((name, run))
            return queue.issued
        with self.lock:
            self.number_issued += 1
            # The collector frees memory at any time. On a GPU that is no operation: no other stream waits for it.
            queue.operations.append(Operation(name, run, after, self.number_issued, meets, begun=name == "free"))
            queue.issued += 1
            position = queue.issued
            if name != "free" and self.background and self.random.random() < self.background:
                some = self.random.choice(self.all_queues)
                self.advance(some, some.issued, self.random.randint(1, 4))
            return position

    def launch(self, queue: Queue, name: str, run, meets=None) -> int:
        """As `put`, for what the program asked for by name."""
        if queue.recording is None:
            self.launches.append(name)
        if not queue.ptr:
            self.null_launches.append(name)
        return self.put(queue, name, run, None, meets)

    def spoil(self, queue: Queue, what: str):
        """Refuse what a recording does not allow, as CUDA does: the recording is lost too."""
        assert queue.recording is not None
        queue.recording.spoilt = what
        raise CUDARuntimeError(
            f"cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing ({what})"
        )

    def advance(self, queue: Queue, position: int, steps: int | None = None):
        """Run what `position` operations of a stream need: all of it, or at most `steps` operations and no waiting."""
        if queue.recording is not None and steps is None:
            self.spoil(queue, "the host waits for the stream")
        self._advance(queue, position, steps)
        start = time.monotonic()
        while steps is None and queue.finished < position:  # for another rank, while all streams go on
            time.sleep(1e-4)
            for each in tuple(self.all_queues):
                self._advance(each, each.issued)
            if time.monotonic() - start > self.patience:
                stuck = [each.operations[0].name for each in self.all_queues if each.operations]
                raise DeviceHangError(f"the host waits for a device that waits for ever: {'; '.join(stuck)}")

    def _advance(self, queue: Queue, position: int, steps: int | None = None):
        with self.lock:
            if self.one_queue:
                self._advance_in_issue_order(queue, position, steps)
                return
            goals = [(queue, position)]
            while goals and steps != 0:
                queue, position = goals[-1]
                if queue.finished >= position:
                    goals.pop()
                    continue
                after = queue.operations[0].after
                if after is not None and after[0].finished < after[1]:
                    goals.append(after)
                    continue
                if not self._met(queue.operations[0]):
                    return
                self._run(queue)
                steps = None if steps is None else steps - 1

    def _met(self, operation: Operation) -> bool:
        """Whether an operation that has begun can end."""
        operation.begun = True
        return operation.meets is None or self.broken or operation.meets()

    def _advance_in_issue_order(self, queue: Queue, position: int, steps: int | None = None):
        """As a GPU whose streams share one queue: nothing begins before all that was issued earlier has begun."""
        while queue.finished < position and steps != 0:
            running = [each for each in self.all_queues if each.operations and each.operations[0].begun]
            for each in running:
                if self._met(each.operations[0]):
                    self._run(each)
                    break
            else:
                waiting = []
                for each in self.all_queues:
                    for place in range(len(each.operations)):  # no iterator: a memory may be freed meanwhile
                        if not each.operations[place].begun:
                            waiting.append((each.operations[place].number, each, place))
                            break
                if not waiting:
                    return
                _, first, place = min(waiting, key=lambda one: one[0])
                after = first.operations[place].after
                if place or (after is not None and after[0].finished < after[1]):
                    return  # behind a kernel that meets a peer, or behind an event
                if not self._met(first.operations[0]):
                    continue
                self._run(first)
            steps = None if steps is None else steps - 1

    def _run(self, queue: Queue):
        operation = queue.operations.popleft()
        try:
            if operation.run is not None and not self.broken:
                operation.run()
        except Exception as error:
            self.errors.append(f"{operation.name}: {error}")
            self.broken = True  # as on a GPU, nothing runs after a failure
            raise CUDARuntimeError(f"cudaErrorLaunchFailure: in {operation.name}: {error}") from error
        finally:
            queue.finished += 1

    def glance(self, queue: Queue, position: int) -> bool:
        """Whether a stream has come to `position`; the device works a little while the host looks."""
        self.advance(queue, position, self.random.randint(0, 3))
        return queue.finished >= position

    def drain(self):
        """Run everything, and return what went wrong since the start."""
        for queue in self.all_queues:
            while queue.finished < queue.issued:
                try:
                    self.advance(queue, queue.issued)
                except CUDARuntimeError:
                    pass  # in self.errors
        for block in self.blocks:
            self._check(block, block.used)
        return self.errors

    # -- memory

    def take(self, key, nbytes: int) -> Block:
        """A block of at least `nbytes`, the one freed last under `key` if there is one of its size."""
        whole = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self.lock:
            free = self.free_blocks.get((key, whole))
            if free:
                block = free.pop()
            else:
                block = Block(whole)
                self.blocks.append(block)
            block.used = nbytes
            return block

    def give(self, key, block: Block):
        with self.lock:
            block.used = 0
            self.free_blocks.setdefault((key, block.nbytes), []).append(block)

    def poison(self, block: Block, used: int):
        """What happens on the device when `used` bytes are freed."""
        self._check(block, used)
        block.poison()

    def _check(self, block: Block, used: int):
        if block.overrun(used):
            block.poison()
            where = f"beside an allocation of {used} bytes" if used else "to memory after its end"
            self.errors.append(f"something was written {where}")

    def cross(self, direction: str | None, nbytes: int):
        """Note that bytes are copied between host and device, "to_device" or "to_host"; None: they are not."""
        if direction is not None:
            with self.lock:
                self.crossed[direction] += nbytes

    def count(self, what: str):
        """Note that the host waited for the device."""
        self.synchronisations.append(what)


_machines: list[Machine] = []
_handles = count(0x7000, 16)  # never the same one twice


def machine() -> Machine:
    """The machine that is installed."""
    if not _machines:
        raise RuntimeError("no emulated device is installed")
    return _machines[-1]
