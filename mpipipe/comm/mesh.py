"""Where a rank stands: a grid pipe x data x seq of ranks, and the communicators along its axes."""

from __future__ import annotations

import shlex
import socket
import sys
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import Communicator, RankGroup, communicators, group_of, raise_on_all, rank_list
from mpipipe.text import counted

__all__ = ["Coordinates", "Mesh"]


class Coordinates(NamedTuple):
    """A place in the grid, or its extents.

    Parameters
    ----------
    pipe, data, seq : int
    """

    pipe: int
    data: int
    seq: int


ORDER = "pipe,data,seq"


def rank_at(place: Coordinates, shape: Coordinates, order: str = ORDER) -> int:
    """Return the rank at a place in a grid, whose last axis in `order` varies fastest."""
    rank = 0
    for axis in order.split(","):
        rank = rank * getattr(shape, axis) + getattr(place, axis)
    return rank


#     order             ranks of a node of four, on 2 x 4 ranks          what stays within a node
#     pipe,data,seq     stage 0 of replicas 0, 1, 2, 3                   sums of gradients
#     data,pipe,seq     stages 0 and 1 of replicas 0 and 1               activations
class Mesh:
    """A grid of ranks.

    A context manager; `close()` is collective, may be called twice, and is not called in `__del__`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Communicator to divide; by default COMM_WORLD. It is duplicated, never used itself.
    pipe : int
        Ranks of one pipeline.
    seq : int
        Ranks that share one sequence.
    data : int, optional
        Replicas; by default what the size of `comm` leaves.
    order : str, optional
        The axes with commas between, the one last in which neighbouring ranks are neighbours. Where
        ranks lie in blocks on nodes, the last axes stay within a node.

    Attributes
    ----------
    pipe, seq, data, replicas, comm : Communicator
        The ranks along each axis through this rank; those that hold the same stages, data x seq of
        them; all of them.
    rank, coords, shape : int, Coordinates, Coordinates
        This rank in `comm`, where it stands (pipe, data, seq), and the extents of the grid.

    Raises
    ------
    ArgumentError, MismatchError
        On every rank, when the extents do not multiply to the size of `comm`, or differ between
        ranks.

    Examples
    --------
    Four ranks, here threads of one process, as two pipelines of two ranks:

    >>> from mpipipe import Mesh
    >>> from mpipipe.job import inprocess
    >>> def place(comm):
    ...     with Mesh(comm, pipe=2, seq=2) as mesh:
    ...         return tuple(mesh.coords), mesh.pipe.size
    >>> inprocess.run(4, place)
    [((0, 0, 0), 2), ((0, 0, 1), 2), ((1, 0, 0), 2), ((1, 0, 1), 2)]
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        pipe: int = 1,
        seq: int = 1,
        data: int | None = None,
        order: str = ORDER,
    ) -> None:
        self.group = group_of(comm)
        with self.group.raise_together("making a Mesh"):
            remedy = OTHER_EXTENTS
            if self.group.size == 1:
                command = shlex.join(sys.orig_argv)
                ranks = pipe * seq * (data or 1)
                remedy = f"this is one process; start several: mpiexec -n {ranks} {command}"
            self.shape = extents_of(self.group.size, pipe, seq, data, remedy)
            if sorted(order.split(",")) != sorted(self.shape._fields):
                raise ArgumentError(
                    "no order of the axes of a mesh",
                    found=f"order={order!r}",
                    expected=f"pipe, data and seq, as in {ORDER!r}",
                )
        self.order = order
        extents = (*self.shape._asdict().items(), ("order", order))
        self.group.agree("making a Mesh", extents)
        self.comm = communicators.duplicate(self.group.comm)
        self.rank = self.comm.rank
        self.coords = self.coords_of(self.rank)
        p, d, s = self.coords
        self.pipe = self.group.split(d * self.shape.seq + s, self.rank, "pipe")
        self.data = self.group.split(p * self.shape.seq + s, self.rank, "data")
        self.seq = self.group.split(p * self.shape.data + d, self.rank, "seq")
        self.replicas = self.group.split(p, d * self.shape.seq + s, "replicas")
        self._closed = False

    def coords_of(self, rank: int) -> Coordinates:
        """Return the grid coordinates of a rank of the mesh."""
        place = {}
        for axis in reversed(self.order.split(",")):
            rank, place[axis] = divmod(rank, getattr(self.shape, axis))
        return Coordinates(**place)

    def rank_of(self, pipe: int, data: int, seq: int) -> int:
        """Return the rank of the mesh at these coordinates.

        Parameters
        ----------
        pipe, data, seq : int
        """
        return rank_at(Coordinates(pipe, data, seq), self.shape, self.order)

    def close(self) -> None:
        """Free the communicators; collective over the mesh, may be called twice."""
        if self._closed:
            return
        for comm in (self.replicas, self.seq, self.data, self.pipe, self.comm):
            comm.Free()
        self._closed = True

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # Freeing is collective: after an error the other ranks would be waited for in vain.
        if kind is None:
            self.close()


OTHER_EXTENTS = "start another number of ranks, or choose other extents"
MOST_SEQ = 64  # ranks that share a sequence; more of them on few ranks are meant as a length


def extents_of(
    size: int, pipe: int, seq: int, data: int | None = None, remedy: str = OTHER_EXTENTS
) -> Coordinates:
    """Return the extents of a mesh of `size` ranks. Raises ArgumentError where they do not fit."""
    extents = {"pipe": pipe, "seq": seq}
    if data is not None:
        extents["data"] = data
    for name, extent in extents.items():
        if not isinstance(extent, int) or extent < 1:
            raise ArgumentError(
                f"mesh extent {name}", found=repr(extent), expected="an integer of at least 1"
            )
    if data is None:
        data = size // (pipe * seq)
    product = pipe * data * seq
    if product != size:
        expected = f"pipe {pipe} x data {data} x seq {seq} = {counted(product, 'rank')}"
        if size % (pipe * seq) or not data:
            expected = f"a multiple of pipe {pipe} x seq {seq}"
        if seq >= max(size, MOST_SEQ):
            remedy = f"seq counts the ranks that share a sequence; did you mean --seq-len {seq}?"
        raise ArgumentError(
            "the mesh does not fit the ranks",
            found=counted(size, "rank"),
            expected=expected,
            remedy=remedy,
        )
    return Coordinates(pipe, data, seq)


# -- Which device a rank computes on ---------------------------------------------------------------


def select_device(name: str = "auto", comm: Communicator | None = None) -> str:
    """Return the device of this rank, "cpu" or "cuda", the same on all ranks; collective.

    `name` is "cpu"; "cuda", for the ranks of a host its GPUs in turn; "cuda:N", GPU number N; or
    "auto", the GPUs where there are some, else the CPU. A GPU that is chosen becomes the current
    one.

    All ranks raise BackendError for an unknown name, and where a GPU was asked for and a rank has
    none or lacks parts of CUDA; and MismatchError where "auto" finds GPUs for some ranks only.
    """
    group = group_of(comm)
    place = local_rank(group)
    with group.raise_together("select_device"):
        chosen = name
        if name in ("auto", "cuda") and arrays.device_count():
            chosen = f"cuda:{place % arrays.device_count()}"
        kind = arrays.check_device(chosen)
    kinds = group.gather("select_device", kind)
    without = [rank for rank, other in enumerate(kinds) if other == "cpu"]
    if 0 < len(without) < group.size:
        problem = MismatchError(
            "some ranks have a GPU, and some have none",
            found=f"no GPU on {rank_list.named(without)} of {group.size}",
            expected="the same kind of device on every rank",
            remedy="ask for GPUs on every node, or use the device 'cpu'",
        )
        raise_on_all(without[0], problem, group)
    return kinds[group.rank]


def local_rank(group: RankGroup) -> int:
    """Position of this rank among the ranks of the group on its host; collective."""
    group.agree("finding the ranks of each host")
    return communicators.rank_on_host(group.comm)


def describe(group: RankGroup, device: str) -> list[str]:
    """Say of each rank its host, its place on it, and its device; collective."""
    place = device
    if device != "cpu":
        place = f"cuda:{arrays.current_gpu()}"
    line = f"rank {group.rank}: {socket.gethostname()}, local rank {local_rank(group)}, {place}"
    return group.gather("describing the devices", line)
