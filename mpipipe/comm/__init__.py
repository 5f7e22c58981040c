"""All that talks to MPI: the only room that imports mpi4py, and only when it is called."""

from mpipipe.comm.mesh import Mesh

__all__ = ["Mesh"]
