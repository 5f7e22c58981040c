"""Which device a rank computes on."""

from __future__ import annotations

import socket
from typing import NoReturn

from mpipipe import arrays
from mpipipe.comm import communicators, rank_list
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import BackendError, MismatchError, MpipipeError


def select_device(name: str = "auto", comm: Communicator | None = None) -> str:
    """Choose the device of this rank; collective over `comm`. A GPU that is chosen becomes the current one.

    Parameters
    ----------
    name : str
        "cpu"; "cuda", for the ranks of a host its GPUs in turn; "cuda:N", GPU number N; "auto", the GPUs where there
        are some, else the CPU.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that choose together; by default COMM_WORLD.

    Returns
    -------
    str
        "cpu" or "cuda", the same on all ranks.

    Raises
    ------
    BackendError
        On all ranks, where a GPU was asked for and a rank has none or lacks parts of CUDA, or for an unknown name.
    MismatchError
        On all ranks, where "auto" finds GPUs for some ranks only.

    Examples
    --------
    >>> from mpipipe import select_device
    >>> from mpipipe.comm import inprocess
    >>> inprocess.run(2, lambda comm: select_device("cpu", comm))
    ['cpu', 'cpu']
    """
    group = group_of(comm)
    place = local_rank(group)
    error: MpipipeError | None = None
    kind = None
    try:
        kind = arrays.check_device(_in_turn(name, place))  # which looks at that GPU alone
    except MpipipeError as caught:
        error = caught
    except Exception as caught:  # CuPy's own, such as cudaErrorDevicesUnavailable
        error = BackendError(
            f"a GPU cannot be used: {type(caught).__name__}: {caught}",
            remedy="look at nvidia-smi on that node: another process may have the GPU for itself, or it is broken",
        )
    kinds = group.gather("select_device", kind, error)
    without = [rank for rank, other in enumerate(kinds) if other == "cpu"]
    if 0 < len(without) < group.size:
        _refuse(group, without)
    return kinds[group.rank]


def _in_turn(name: str, place: int) -> str:
    count = arrays.device_count() if name in ("auto", "cuda") else 0
    return f"cuda:{place % count}" if count else name


def _refuse(group: Group, without: list[int]) -> NoReturn:
    problem = MismatchError(
        "some ranks have a GPU, and some have none",
        found=f"no GPU on {rank_list.named(without)} of {group.size}",
        expected="the same kind of device on every rank",
        remedy="ask for GPUs on every node, or use the device 'cpu'",
    )
    raise_on_all(without[0], problem, group)


def local_rank(group: Group) -> int:
    """Position of this rank among the ranks of the group on its host; collective."""
    group.agree("finding the ranks of each host")
    return communicators.rank_on_host(group.comm)


def describe(group: Group, device: str) -> list[str]:
    """One line for each rank: its host, its place there, its device; the same on every rank. Collective."""
    place = device if device == "cpu" else f"cuda:{arrays.cupy().cuda.runtime.getDevice()}"
    mine = f"rank {group.rank}: {socket.gethostname()}, local rank {local_rank(group)}, {place}"
    return group.gather("describing the devices", mine)
