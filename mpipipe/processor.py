"""Settings of the process that make array code on a rank fast: BLAS threads and memory."""

from __future__ import annotations

import ctypes
import os

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def prepare_process() -> None:
    """Make the settings of this module: what `train`, `run` and `bench` do first."""
    limit_blas_threads()
    keep_freed_memory()


def limit_blas_threads() -> None:
    """Use one BLAS thread per rank, unless the user set a number of threads (OMP_NUM_THREADS and its kin).

    A number is a positive integer, or OpenMP's list of one for each level of nesting ("4,2"). BLAS libraries ignore
    anything else, such as an empty text, and take all cores: so there is a limit then, too.
    """
    if any(_sets_threads(os.environ.get(name, "")) for name in THREAD_VARIABLES):
        return
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def _sets_threads(text: str) -> bool:
    counts = [count.strip() for count in text.split(",")]
    return all(count.isascii() and count.isdigit() and count.strip("0") for count in counts)


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
