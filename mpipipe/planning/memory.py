"""How much memory this process holds, and how much of it are arrays."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from mpipipe import arrays, nn, processor
from mpipipe.adapters import Tape

# -- Resident memory of this process, where the operating system says it: on Linux -----------------


# What a training adds to a process that has computed: modules that are imported late, threads, gaps
# between arrays; and MPI itself, where it is not there yet. Measured with MPICH 5.0 and Open MPI
# 5.0, for tasks of numpy and of PyTorch.
SETTLED = 9_000_000
MPI = 16_000_000


def process_bytes() -> int:
    """Return the bytes of a process that trains, besides arrays."""
    size = resident() + SETTLED
    if "mpi4py.MPI" not in sys.modules:
        size += MPI
    return size


def resident() -> int:
    """Return the resident bytes of this process; the peak begins anew here."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return processor.bytes_of_line("VmRSS", "/proc/self/status") or 0


def peak() -> int:
    """Return the most bytes resident since `resident` was called, or since the start."""
    return processor.bytes_of_line("VmHWM", "/proc/self/status") or 0


# -- How many bytes work allocates -----------------------------------------------------------------


UNTRACED = {"torch", "jax"}  # libraries that allocate by themselves


OWN_THREAD = re.compile("MainThread$|mpipipe ")


class _Tracer:
    """Python's trace of what is allocated, for all ranks of this process that are threads.

    To stop it while another thread allocates ends the process by SIGSEGV (Python 3.12.8, 3.13.0 and
    3.13.1: python/cpython#128679). So the last rank that measures stops it, and the ranks wait for
    each other before any of them computes again. Where there are other threads, such as those of a
    user, nothing stops it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.was_on = False

    def __enter__(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.was_on = tracemalloc.is_tracing()
                gc.freeze()
                tracemalloc.start()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                gc.unfreeze()
                names = [thread.name for thread in threading.enumerate()]
                if not self.was_on and all(map(OWN_THREAD.match, names)):
                    tracemalloc.stop()


_TRACER = _Tracer()


def tracing() -> AbstractContextManager[None]:
    """Let Python trace allocations within a block, for `taking`.

    Ranks that measure agree on something right after it, and compute nothing before that; see
    `_Tracer`.
    """
    if UNTRACED & sys.modules.keys():
        return nullcontext()
    return _TRACER


def taking() -> Callable[[], int]:
    """Return a function that returns the most bytes allocated at once since, beyond now.

    Arrays are counted one by one, for resident memory also depends on what the process does
    besides, and has done before. Where a library is there that Python cannot trace, resident memory
    is what is known.
    """
    if UNTRACED & sys.modules.keys():
        start = resident()
        return lambda: peak() - start
    gc.collect()
    tracemalloc.reset_peak()
    start = tracemalloc.get_traced_memory()[0]
    return lambda: tracemalloc.get_traced_memory()[1] - start


# -- How many bytes objects hold in arrays ---------------------------------------------------------


# These hold no arrays of a micro-batch.
OPAQUE = (nn.Layer, nn.Stage, ModuleType, type, str, bytes, int, float)


def array_bytes(thing: object) -> dict[int, int]:
    """Return the bytes of each memory of arrays in `thing`, by address.

    Layers and stages are left out.
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tape):
            sizes |= part.bytes
        elif isinstance(part, np.ndarray):
            while isinstance(part.base, np.ndarray):
                part = part.base
            sizes[arrays.address(part)] = part.nbytes
        elif id(part) not in seen and not isinstance(part, OPAQUE) and not callable(part):
            seen.add(id(part))
            waiting += gc.get_referents(part)
    return sizes


def new_bytes(things: Sequence[object], shared: set[int]) -> list[int]:
    """Return the bytes that each thing holds and neither `shared` nor one before it has."""
    seen = set(shared)
    totals = []
    for thing in things:
        total = 0
        for address, size in array_bytes(thing).items():
            if address not in seen:
                seen.add(address)
                total += size
        totals.append(total)
    return totals
