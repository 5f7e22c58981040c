"""Ranks and their messages. All that talks to MPI is here: the only room that imports mpi4py, and only when called.

where a rank stands      runtime, launcher, settings, mesh, device, describe, process
agreement                group, consensus, presence, notes, attributes, communicators
waiting                  wait, requests
messages                 mailbox, tags, transport/, ring_exchange, allreduce, nccl/
hangs                    flight, watch/
dead ranks               lifeline
the end of a job         abort, ending, excepthook, exit_hooks, report
a job that is preempted  preemption, time_limit
ranks without MPI        inprocess, inprocess_world
names of types           types
"""

from mpipipe.comm.device import select_device
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.preemption import Preemption

__all__ = ["Mesh", "Preemption", "select_device"]
