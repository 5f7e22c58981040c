"""Which device a rank computes on."""

from __future__ import annotations

import socket

from mpipipe import arrays
from mpipipe.comm import runtime, share
from mpipipe.errors import MismatchError, MpipipeError


def select_device(name: str = "auto", comm=None) -> str:
    """Choose the device of this rank, and return "cpu" or "cuda"; collective over `comm` (None: COMM_WORLD).

    Parameters
    ----------
    name : "cpu"; "cuda", for the ranks of a host its GPUs in turn; "cuda:N", GPU number N; "auto", the GPUs where there
        are some

    The chosen GPU becomes the current one. All ranks get the same kind, or the same error: BackendError where a GPU was
    asked for and a rank has none, MismatchError where "auto" finds GPUs for some ranks only.
    """
    comm = runtime.resolve(comm)
    place = local_rank(comm)
    error = kind = None
    try:
        kind = arrays.check_device(name)
        if kind == "cuda" and ":" not in name:
            arrays.use_gpu(place % arrays.device_count())
    except MpipipeError as caught:
        error = caught
    kinds = share.agree(comm, error, kind)
    without = [rank for rank, other in enumerate(kinds) if other == "cpu"]
    if 0 < len(without) < comm.size:
        _refuse(comm, without)
    return kinds[comm.rank]


def _refuse(comm, without):
    problem = MismatchError(
        "some ranks have a GPU, and some have none",
        found=f"no GPU on rank(s) {', '.join(map(str, without))} of {comm.size}",
        expected="the same kind of device on every rank",
        remedy="ask for GPUs on every node, or use the device 'cpu'",
    )
    share.raise_everywhere(comm.rank, [(without[0], problem)])


def local_rank(comm) -> int:
    """Position of this rank among the ranks of `comm` on its host; collective."""
    if hasattr(comm, "store"):  # ranks in one process
        return comm.rank
    node = comm.Split_type(runtime.mpi().COMM_TYPE_SHARED)
    try:
        return node.rank
    finally:
        node.Free()


def describe(comm, device: str) -> list[str]:
    """One line for each rank: its host, its place there, its device; the same on every rank. Collective."""
    place = device if device == "cpu" else f"cuda:{arrays.cupy().cuda.runtime.getDevice()}"
    mine = f"rank {comm.rank}: {socket.gethostname()}, local rank {local_rank(comm)}, {place}"
    return comm.allgather(mine)
