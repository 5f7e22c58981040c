"""Where a rank stands: a grid pipe x data x seq of ranks, and the communicators along its axes."""

from __future__ import annotations

from typing import NamedTuple

from mpipipe.comm import communicators
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.wording import counted

__all__ = ["Coordinates", "Mesh"]


class Coordinates(NamedTuple):
    """A place in the grid, or its extents.

    Parameters
    ----------
    pipe, data, seq : int
        The place, or the extent, along each axis.
    """

    pipe: int
    data: int
    seq: int


class Mesh:
    """A grid of ranks in which seq varies fastest, then data, then pipe.

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

    Attributes
    ----------
    pipe, seq, data : Communicator
        The ranks along each axis through this rank.
    replicas : Communicator
        The ranks that hold the same stages, data x seq of them.
    comm : Communicator
        All ranks of the mesh.
    rank : int
        This rank in `comm`.
    coords : Coordinates
        Where this rank stands: (pipe, data, seq).
    shape : Coordinates
        The extents of the grid.

    Raises
    ------
    ArgumentError
        On every rank, when the extents do not multiply to the size of `comm`.
    MismatchError
        On every rank, when ranks were given different extents.

    Examples
    --------
    Four ranks, here threads of one process, as two pipelines of two ranks:

    >>> from mpipipe import Mesh
    >>> from mpipipe.comm import inprocess
    >>> def place(comm):
    ...     with Mesh(comm, pipe=2, seq=2) as mesh:
    ...         return tuple(mesh.coords), mesh.pipe.size
    >>> inprocess.run(4, place)
    [((0, 0, 0), 2), ((0, 0, 1), 2), ((1, 0, 0), 2), ((1, 0, 1), 2)]
    """

    def __init__(self, comm: Communicator | None = None, pipe: int = 1, seq: int = 1, data: int | None = None) -> None:
        self.group = group_of(comm)
        self.shape = _agreed_extents(self.group, pipe, seq, data)
        self.comm = communicators.duplicate(self.group.comm)
        self.comm.Set_name("mpipipe mesh")
        self.rank = self.comm.rank
        self.coords = self.coords_of(self.rank)
        p, d, s = self.coords
        self.pipe = self._along("pipe", color=d * self.shape.seq + s)
        self.data = self._along("data", color=p * self.shape.seq + s)
        self.seq = self._along("seq", color=p * self.shape.data + d)
        self.replicas = self._along("replicas", color=p)
        self._closed = False

    def coords_of(self, rank: int) -> Coordinates:
        """Return the grid coordinates of a rank of the mesh.

        Parameters
        ----------
        rank : int
            From 0 to the size of the mesh, exclusive.

        Returns
        -------
        Coordinates
            (pipe, data, seq).
        """
        rest, seq = divmod(rank, self.shape.seq)
        pipe, data = divmod(rest, self.shape.data)
        return Coordinates(pipe, data, seq)

    def rank_of(self, pipe: int, data: int, seq: int) -> int:
        """Return the rank of the mesh at these coordinates.

        Parameters
        ----------
        pipe, data, seq : int
            Each less than the extent of its axis.

        Returns
        -------
        int
            The inverse of `coords_of`.
        """
        return (pipe * self.shape.data + data) * self.shape.seq + seq

    def _along(self, name: str, color: int) -> Communicator:
        return self.group.split(color, self.rank, name)

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
        if kind is None:  # freeing is collective: after an error the other ranks would be waited for in vain
            self.close()


def _agreed_extents(group: Group, pipe: int, seq: int, data: int | None) -> Coordinates:
    """The same extents on every rank, or the same error."""
    extents, error = Coordinates(0, 0, 0), None
    try:
        extents = _extents(group.size, pipe, seq, data)
    except MpipipeError as caught:
        error = caught
    group.agree(
        "making a Mesh",
        tuple(extents._asdict().items()),
        error=error,
        message="ranks were given different extents of a mesh",
        remedy="give the same extents on all ranks",
    )
    return extents


def _extents(size: int, pipe: int, seq: int, data: int | None) -> Coordinates:
    for name, extent in (("pipe", pipe), ("seq", seq), ("data", 1 if data is None else data)):
        if not isinstance(extent, int) or extent < 1:
            raise ArgumentError(f"mesh extent {name}", found=repr(extent), expected="an integer of at least 1")
    if data is None:
        data = size // (pipe * seq)
    if pipe * data * seq != size:
        raise ArgumentError(
            "the mesh does not fill the communicator",
            found=counted(size, "rank"),
            expected=f"a multiple of pipe {pipe} x seq {seq}"
            if data == 0 or size % (pipe * seq)
            else f"pipe {pipe} x data {data} x seq {seq} = {counted(pipe * data * seq, 'rank')}",
            remedy="start another number of ranks, or choose other extents",
        )
    return Coordinates(pipe, data, seq)
