"""All that talks to MPI: the only room that imports mpi4py, and only when it is called."""

from mpipipe.comm.device import select_device
from mpipipe.comm.mesh import Mesh

__all__ = ["Mesh", "select_device"]
