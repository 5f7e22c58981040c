"""Messages of arrays between the ranks of a job, and where each rank stands among them.

the ranks                mesh (and the device of each), describe
messages of a pipeline   mailbox, tags, transport/
messages of a ring       ring_exchange
sums over replicas       allreduce
by NCCL                  nccl/

Other rooms import the names below from here. A file is imported when one of its names is first used.
"""

# ruff: noqa: F401  # names of a face
from __future__ import annotations

from mpipipe.faces import lazy_face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.comm.allreduce import AllReduce
    from mpipipe.comm.mailbox import Envelope, Lease, Mailbox, Settled
    from mpipipe.comm.mesh import Mesh, select_device
    from mpipipe.comm.nccl.channel import NcclChoice, agree_on_nccl
    from mpipipe.comm.nccl.sums import NcclRow, NcclSums
    from mpipipe.comm.ring_exchange import ROTATIONS, RingExchange
    from mpipipe.comm.tags import Tags, neighbours
    from mpipipe.comm.transport.choose import make_transport
    from mpipipe.comm.transport.gpu_aware import GpuAwareness
    from mpipipe.comm.transport.host import CHUNK_BYTES, Transport, check_sendable
    from mpipipe.comm.transport.nccl import NcclTransport, Pair

_FILES = {
    "allreduce": "AllReduce",
    "mailbox": "Envelope Lease Mailbox Settled",
    "mesh": "Mesh select_device",
    "nccl.channel": "NcclChoice agree_on_nccl",
    "nccl.sums": "NcclRow NcclSums",
    "ring_exchange": "ROTATIONS RingExchange",
    "tags": "Tags neighbours",
    "transport.choose": "make_transport",
    "transport.gpu_aware": "GpuAwareness",
    "transport.host": "CHUNK_BYTES Transport check_sendable",
    "transport.nccl": "NcclTransport Pair",
}

if not TYPE_CHECKING:  # else a checker of types takes each wrong name for an object
    __all__, __getattr__ = lazy_face(__name__, _FILES)
