"""Settings of the process that make array code on a rank fast: BLAS threads and memory."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def prepare_process(threads: int = 1) -> None:
    """Make the settings of this module: what `train`, `run` and `bench` do first."""
    limit_blas_threads(threads)
    keep_freed_memory()


def limit_blas_threads(threads: int = 1) -> None:
    """Limit BLAS to `threads`, unless the user set a number of threads (OMP_NUM_THREADS and its kin).

    A number is a positive integer, or OpenMP's list of one for each level of nesting ("4,2"). BLAS libraries ignore
    anything else, such as an empty text, and take all cores: so there is a limit then, too.
    """
    if chosen_threads() is not None:
        return
    from threadpoolctl import threadpool_limits

    threadpool_limits(threads)


def chosen_threads() -> int | None:
    """Return the most threads that a variable asks for, None if none does."""
    found = [count for name in THREAD_VARIABLES for count in _threads(os.environ.get(name, ""))]
    return max(found, default=None)


def _threads(text: str) -> list[int]:
    """Return the number that a variable says, and nothing if it says none."""
    counts = [count.strip() for count in text.split(",")]
    if all(count.isascii() and count.isdigit() and count.strip("0") for count in counts):
        return [int(counts[0])]
    return []


@cache
def features() -> frozenset[str]:
    """Return the names of what this processor can do, as Linux has them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    parts = (line.partition(":") for line in lines)
    return next(
        (frozenset(text.split()) for name, _, text in parts if name.strip() in ("flags", "Features")), frozenset()
    )


def keep_freed_memory() -> None:
    """Let glibc keep freed arrays for the next ones instead of handing each back to the kernel.

    Every micro-batch allocates and frees the same activations. Without this the kernel maps each of their pages anew,
    which takes 5 % of a step or more. Nothing is set if the C library has no such setting, or if the user chose one.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and (mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)):
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
