"""Messages of arrays between the ranks of a job, and where each rank stands among them.

the ranks                mesh (and its device), describe
messages of a pipeline   mailbox, tags, transport/
messages of a ring       ring_exchange
sums over replicas       allreduce
by NCCL                  nccl/
"""

import sys

from mpipipe.comm.mesh import Mesh, select_device
from mpipipe.job import inprocess, runtime
from mpipipe.job.preemption import Preemption

__all__ = ["Mesh", "Preemption", "inprocess", "runtime", "select_device"]

for _module in (inprocess, runtime):  # programs import them from here: they were in this room
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
