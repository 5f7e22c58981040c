"""Settings of the process that make array code on a rank fast: threads and memory.

A rank computes with a pool of threads. The host kernels cut large arrays into pieces and give them
to `each`; layers know nothing of it. Pieces depend on the sizes of arrays alone, and what is summed
over pieces is summed in their order, so a kernel has the same bits for any number of threads.

Products use the pool, too: BLAS with one thread on pieces of rows. Threads of BLAS itself wait in
loops that keep their core busy, so two of them next to another busy process are slower than one,
and their sums may have other bits. On idle cores pieces are as fast (see
nn/kernels/host/products.py).
"""

from __future__ import annotations

import ctypes
import os
import re
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from mpipipe.errors import ArgumentError

Piece = TypeVar("Piece")
VARIABLE = "MPIPIPE_THREADS"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
COUNT = r"\s*0*[1-9][0-9]*\s*"  # a positive integer
COUNTS = re.compile(f"{COUNT}(,{COUNT})*")
# of mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
WAIT = 0.0005  # seconds between two polls of a caller that waits for its helpers


def prepare_process(threads: int = 1) -> None:
    """Make the settings of this module: what `train`, `run` and `bench` do first."""
    set_threads(threads)
    keep_freed_memory()


def set_threads(threads: int = 1) -> None:
    """Let this process compute with `threads` threads, unless the user set a number.

    MPIPIPE_THREADS sets it, else OMP_NUM_THREADS and its kin. BLAS has one thread, but for those of
    OMP_NUM_THREADS where MPIPIPE_THREADS=1 leaves it alone. BLAS libraries ignore what is no
    number, such as an empty text, and take all cores: so there is a limit then, too.
    """
    _POOL.threads = _POOL.chosen = chosen_threads() or threads
    if _POOL.threads > 1 or blas_threads() is None:
        _limit_libraries()


def thread_count() -> int:
    """Return how many threads `each` uses: those of `set_threads`, or of the user, or one."""
    if _POOL.threads is None:
        _POOL.threads = chosen_threads() or 1
        if _POOL.threads > 1:
            _limit_libraries()
    return _POOL.threads


def given_threads() -> int | None:
    """Return the number that the user or `set_threads` has set, None if neither has."""
    return _POOL.chosen or chosen_threads()


@contextmanager
def threads_set_to(threads: int) -> Iterator[None]:
    """Let `each` use `threads` threads within, whatever the user set: for measurements."""
    before = thread_count()
    _POOL.threads = threads
    try:
        yield
    finally:
        _POOL.threads = before


def _limit_libraries() -> None:
    """Let BLAS have one thread, and OpenMP, which takes turns with us, as many as the pool."""
    from threadpoolctl import threadpool_limits

    threadpool_limits({"blas": 1, "openmp": thread_count()})


def chosen_threads() -> int | None:
    """Return the number of threads that the user set, None if no variable says one."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return blas_threads()
    count = _threads(text)
    if not count or "," in text:
        raise ArgumentError(
            f"environment variable {VARIABLE}", found=repr(text), expected="a positive integer"
        )
    return count


def blas_threads() -> int | None:
    """Return the most threads that a variable of BLAS libraries asks for, None if none does.

    A number is a positive integer, or OpenMP's list of one for each level of nesting ("4,2").
    """
    return max(_threads(os.environ.get(name, "")) for name in THREAD_VARIABLES) or None


def _threads(text: str) -> int:
    """Return the number that a variable says, and 0 if it says none."""
    if COUNTS.fullmatch(text):
        return int(text.split(",")[0])
    return 0


@cache
def features() -> frozenset[str]:
    """Return the names of what this processor can do, as Linux has them; none elsewhere."""
    return frozenset(
        (line_of("/proc/cpuinfo", "flags") or line_of("/proc/cpuinfo", "Features")).split()
    )


# -- The pool --------------------------------------------------------------------------------------


def each(
    work: Callable[[Piece], object],
    pieces: Sequence[Piece],
    poll: Callable[[], object] | None = None,
) -> None:
    """Call `work` for each of the pieces, on the threads of the pool, and return when all are done.

    The calling thread works, too. Pieces are begun in their order, and any thread may get any of
    them. After an error no further piece is begun, and the first error is raised when the others
    have ended; so it is with Ctrl-C. Where the pool is in use, as in a piece that calls `each`, or
    on another thread of the user, the caller does all of them.

    Parameters
    ----------
    work, pieces : callable, sequence
        What is called with each piece. It runs in a copy of the caller's context, so numpy's
        `errstate` holds.
    poll : callable, optional
        Called again and again by a caller that waits for other threads.
    """
    if (
        _POOL.threads == 1
        or len(pieces) < 2
        or thread_count() == 1
        or not _POOL.free.acquire(False)
    ):
        for piece in pieces:
            work(piece)
        return
    try:
        _POOL.run(_Job(work, iter(pieces)), min(_POOL.threads or 1, len(pieces)) - 1, poll)
    finally:
        _POOL.free.release()


class _Job:
    """Pieces that threads take from one iterator.

    `came` and `left` have an entry for each helper that has begun or ended. A helper writes itself
    into `came` before it takes a piece. So when the iterator is empty, no piece is at work but
    those of helpers in `came`, and not `left`.
    """

    __slots__ = ("came", "context", "ended", "errors", "left", "pieces", "work")

    def __init__(self, work: Callable[[Any], object], pieces: Iterator[Any]) -> None:
        self.work = work
        self.pieces = pieces
        self.context = copy_context()
        self.came: list[None] = []
        self.left: list[None] = []
        self.errors: list[BaseException] = []
        self.ended: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """Take pieces until there are no more: what a thread of the pool does."""
        self.came.append(None)
        try:
            for piece in self.pieces:
                self.work(piece)
        except BaseException as error:
            self.errors.append(error)
            self.stop()
        finally:
            self.left.append(None)
            self.ended.put(None)

    def stop(self) -> None:
        """Let no further piece begin."""
        deque(self.pieces, maxlen=0)  # one call, within which no signal of Python comes

    def finish(self, poll: Callable[[], object] | None) -> None:
        """Wait until no helper is at a piece, also after Ctrl-C or an error of `poll`."""
        raised: BaseException | None = None
        while True:
            try:
                self.stop()
                while len(self.left) < len(self.came):
                    try:
                        self.ended.get(timeout=None if poll is None else WAIT)
                    except Empty:
                        assert poll is not None
                        poll()
                break
            except BaseException as error:
                raised = error
                poll = None
        if raised is not None:
            raise raised


class _Pool:
    """Threads that wait for jobs, as daemons: they hold up no exit of the interpreter."""

    def __init__(self) -> None:
        self.threads: int | None = None  # and the caller's; None until somebody asks
        self.chosen: int | None = None  # set by `set_threads`
        self.free = allocate_lock()
        self.job: _Job | None = None
        self.wakes: list[LockType] = []  # one for each helper, which goes on when it gets it

    def run(self, job: _Job, helpers: int, poll: Callable[[], object] | None) -> None:
        """Do a job with this number of helpers. One that does not wake up in time is left out."""
        while len(self.wakes) < helpers:
            wake = allocate_lock()
            wake.acquire()
            Thread(target=self._serve, args=(wake,), name="mpipipe pool", daemon=True).start()
            self.wakes.append(wake)
        try:
            self.job = job
            for wake in self.wakes[:helpers]:
                # One that has not come to an earlier job yet will find this one.
                if wake.locked():
                    wake.release()
            for piece in job.pieces:
                job.work(piece)
        finally:
            self.job = None
            job.finish(poll)
        if job.errors:
            raise job.errors[0]

    def _serve(self, wake: LockType) -> None:
        while True:
            wake.acquire()
            job = self.job
            if job is not None:
                context: Context = job.context.copy()
                context.run(job.help)
            job = context = None  # type: ignore[assignment]  # they hold arrays


_POOL = _Pool()


def _forget_threads() -> None:
    """In the child of a fork, which has the calling thread alone."""
    _POOL.free = allocate_lock()
    _POOL.job = None
    _POOL.wakes = []


os.register_at_fork(after_in_child=_forget_threads)


# -- Memory ----------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Let glibc keep freed arrays for the next ones instead of handing each back to the kernel.

    Every micro-batch allocates and frees the same activations. Without this the kernel maps each of
    their pages anew, which takes 5 % of a step or more. Nothing is set if the C library has no such
    setting, or if the user chose one.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and (
        mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)
    ):
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


# -- Lines `name: value` in files of /proc ---------------------------------------------------------


def bytes_of_line(name: str, path: str = "/proc/meminfo") -> int | None:
    """Return the bytes that a line of a file of /proc says in kB, or None."""
    text = line_of(path, name).split()
    if text:
        return int(text[0]) * 1024
    return None


def line_of(path: str, name: str) -> str:
    """Return what follows `name:` in a file of /proc; empty if there is no such thing."""
    try:
        text = Path(path).read_text()
    except OSError:
        return ""
    found = re.search(rf"^[ \t]*{re.escape(name)}\s*:(.*)", text, re.MULTILINE)
    if found is None:
        return ""
    return found[1].strip()
