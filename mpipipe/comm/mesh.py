"""Where a rank stands: a grid pipe x data x seq of ranks, and the communicators along its axes."""

from __future__ import annotations

from typing import NamedTuple

from mpipipe.comm import communicators
from mpipipe.comm.group import group_of
from mpipipe.errors import ArgumentError, MpipipeError


class Coordinates(NamedTuple):
    pipe: int
    data: int
    seq: int


class Mesh:
    """A grid of ranks in which seq varies fastest, then data, then pipe.

    Parameters
    ----------
    comm : communicator to divide; None means COMM_WORLD. It is duplicated, never used itself.
    pipe : ranks of one pipeline
    seq : ranks that share one sequence
    data : replicas; None takes what the size of `comm` leaves

    Attributes
    ----------
    pipe, seq, data, replicas : communicators of this rank along each axis; replicas = data x seq, the ranks that hold
        the same stages
    coords : Coordinates(pipe, data, seq) of this rank
    shape : the same, the extents

    Raises ArgumentError, on every rank, when the extents do not multiply to the size of `comm`. A context manager;
    `close()` is collective, may be called twice, and is not called in `__del__`.
    """

    def __init__(self, comm=None, pipe: int = 1, seq: int = 1, data: int | None = None):
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

    def coords_of(self, rank: int) -> Coordinates:
        """Grid coordinates of a rank of the mesh."""
        rest, seq = divmod(rank, self.shape.seq)
        pipe, data = divmod(rest, self.shape.data)
        return Coordinates(pipe, data, seq)

    def rank_of(self, pipe: int, data: int, seq: int) -> int:
        """The rank of the mesh at these coordinates."""
        return (pipe * self.shape.data + data) * self.shape.seq + seq

    def _along(self, name, color):
        return self.group.split(color, self.rank, name)

    def close(self):
        """Free the communicators; collective over the mesh."""
        if self.comm is None:
            return
        for comm in (self.replicas, self.seq, self.data, self.pipe, self.comm):
            comm.Free()
        self.comm = self.pipe = self.data = self.seq = self.replicas = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:  # freeing is collective: after an error the other ranks would be waited for in vain
            self.close()


def _agreed_extents(group, pipe, seq, data) -> Coordinates:
    """The same extents on every rank, or the same error."""
    error, facts = None, ()
    try:
        facts = _extents(group.size, pipe, seq, data)
    except MpipipeError as caught:
        error = caught
    group.agree(
        "making a Mesh",
        tuple(zip(Coordinates._fields, facts)),
        error=error,
        message="ranks were given different extents of a mesh",
        remedy="give the same extents on all ranks",
    )
    return facts


def _extents(size: int, pipe: int, seq: int, data: int | None) -> Coordinates:
    for name, extent in (("pipe", pipe), ("seq", seq), ("data", 1 if data is None else data)):
        if not isinstance(extent, int) or extent < 1:
            raise ArgumentError(f"mesh extent {name}", found=repr(extent), expected="an integer of at least 1")
    if data is None:
        data = size // (pipe * seq)
    if pipe * data * seq != size:
        raise ArgumentError(
            "the mesh does not fill the communicator",
            found=f"{size} ranks",
            expected=f"a multiple of pipe {pipe} x seq {seq}"
            if data == 0 or size % (pipe * seq)
            else f"pipe {pipe} x data {data} x seq {seq} = {pipe * data * seq} ranks",
            remedy="start another number of ranks, or choose other extents",
        )
    return Coordinates(pipe, data, seq)
