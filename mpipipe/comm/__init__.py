"""Messages of arrays between the ranks of a job, and where each rank stands among them.

the ranks                mesh (and the device of each), describe
messages of a pipeline   mailbox, tags, transport/
messages of a ring       ring_exchange
parts to other ranks     transfer
sums over replicas       allreduce
what advances in pieces  pieces
sums by NCCL             nccl/

Other rooms import the names below from here. A file is imported when one of its names is first used
(faces.py).
"""

from mpipipe.faces import lazy_face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.comm.allreduce import AllGather, AllReduce
    from mpipipe.comm.describe import mpi_library
    from mpipipe.comm.mailbox import Envelope, Incoming, Leaf, Lease, Mailbox
    from mpipipe.comm.mesh import ORDER, Coordinates, Mesh, extents_of, rank_at, select_device
    from mpipipe.comm.nccl.channel import agree_on_nccl
    from mpipipe.comm.nccl.sums import NcclSums
    from mpipipe.comm.ring_exchange import ROTATIONS, RingExchange
    from mpipipe.comm.tags import BACKWARD, DATA, FORWARD, HEADER, Tags
    from mpipipe.comm.transfer import (
        Index,
        PartMove,
        Transfer,
        all_to_all,
        along,
        exchange_on,
        halo_of,
    )
    from mpipipe.comm.transport.gpu_aware import make_transport
    from mpipipe.comm.transport.host import Transport, check_sendable

if not TYPE_CHECKING:  # a checker of types would take each wrong name for an object
    __all__, __getattr__ = lazy_face(__name__, __file__)
