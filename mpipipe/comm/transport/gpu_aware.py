"""Which transport carries the arrays of a rank: whether MPI may have addresses in device memory.

A wrong yes ends in a crash.

MPIPIPE_GPU_DIRECT says so, or else the MPI library itself, by MPIX_Query_cuda_support or its like.
Without a yes of all ranks messages are staged through the host, which works everywhere.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.host import Transport
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.job import GPU_DIRECT, Communicator, RankGroup, group_of, runtime

logger = logging.getLogger("mpipipe")
# maker -> functions that answer 1 or 0 (Open MPI's, MPICH's)
QUESTIONS = {
    "NVIDIA": ("MPIX_Query_cuda_support",),
    "AMD": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
# Where they have no GPU support, their functions may fail an assertion. Cray MPICH is derived from
# 3.4, whatever its own version is.
NOT_ASKED = r"CRAY MPICH|MPICH Version:\s*[1-3]\."


class GpuAwareness(NamedTuple):
    """Whether device arrays go to MPI directly, and why or why not."""

    direct: bool
    reason: str

    def __str__(self) -> str:
        if self.direct:
            return f"direct: {self.reason}"
        return f"staged through the host: {self.reason}"


def make_transport(
    comm: Communicator,
    channels: int = 1,
    synchronous: bool = False,
    device: str = "cpu",
    group: RankGroup | None = None,
) -> Transport:
    """Return the transport for arrays on "cpu" or "cuda", the same on all ranks; collective.

    The ranks agree in `group`, by default in that of `comm`.
    """
    if device == "cpu":
        return Transport(comm, channels, synchronous)
    verdict = detect(comm, group)
    if comm.rank == 0:
        logger.info("device arrays travel %s", verdict)
    if verdict.direct:
        return DeviceTransport(comm, channels, synchronous)
    return StagedTransport(comm, channels, synchronous)


def detect(comm: Communicator, group: RankGroup | None = None) -> GpuAwareness:
    """The verdict for all ranks of `comm`, direct only where each rank says so; collective.

    The ranks agree in `group`, by default in that of `comm`.
    """
    group = group or group_of(comm)
    what = "asking whether MPI takes device memory"
    verdict = GpuAwareness(False, "the ranks are threads of one process")
    with group.raise_together(what):
        if not runtime.in_process(comm):
            verdict = _of_this_rank()
    return combine(group.gather(what, verdict))


def combine(verdicts: Sequence[GpuAwareness]) -> GpuAwareness:
    """One verdict for all ranks, with the reason of the first rank that is against."""
    for rank, verdict in enumerate(verdicts):
        if not verdict.direct:
            return GpuAwareness(False, f"on rank {rank}: {verdict.reason}")
    return verdicts[0]


def _of_this_rank() -> GpuAwareness:
    setting = GPU_DIRECT.text
    if setting != "0" and _allocator_is_async():
        reason = "CuPy's allocator is an asynchronous or managed one, whose memory MPI cannot share"
        return GpuAwareness(False, f"{reason} (use cupy.cuda.MemoryPool())")
    if setting:
        return GpuAwareness(setting == "1", f"{GPU_DIRECT.name}={setting}")
    maker = "NVIDIA"
    if arrays.is_amd():
        maker = "AMD"
    answer = ask_library(maker)
    words = {
        None: "does not say, or cannot be asked, whether it takes device memory; if it does, set "
        f"{GPU_DIRECT.name}=1",
        0: "says that it does not take device memory",
        1: "says that it takes device memory",
    }
    return GpuAwareness(answer == 1, f"this MPI {words[answer]}")


def ask_library(maker: str) -> int | None:
    """Ask the library to which mpi4py is linked: 1, 0, or None for no answer."""
    MPI = runtime.mpi()
    if re.search(NOT_ASKED, MPI.Get_library_version(), re.IGNORECASE):
        return None
    library = ctypes.CDLL(MPI.__file__)
    for name in QUESTIONS[maker]:
        ask = getattr(library, name, None)
        if ask is not None:
            return int(ask() != 0)
    return None


def _allocator_is_async() -> bool:
    """Whether CuPy allocates other memory than that of plain cudaMalloc."""
    if not arrays.device_count():
        return False
    cuda = arrays.cupy().cuda
    allocator = cuda.get_allocator()
    kinds = [getattr(cuda, name, None) for name in ("malloc_async", "malloc_managed")]
    return allocator in kinds or isinstance(
        getattr(allocator, "__self__", None), cuda.MemoryAsyncPool
    )
