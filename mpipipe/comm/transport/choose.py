"""Which transport carries the arrays of a rank."""

from __future__ import annotations

import logging

from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.host import HostTransport, Transport
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.job import Communicator, RankGroup

logger = logging.getLogger("mpipipe")


def make_transport(
    comm: Communicator,
    channels: int = 1,
    synchronous: bool = False,
    device: str = "cpu",
    group: RankGroup | None = None,
) -> Transport:
    """Return the transport for arrays on "cpu" or "cuda", the same on all ranks; collective.

    The ranks agree in `group`, by default in that of `comm`.
    """
    if device == "cpu":
        return HostTransport(comm, channels, synchronous)
    verdict = gpu_aware.detect(comm, group)
    kind: type[DeviceTransport] = StagedTransport
    way = "by the host"
    if verdict.direct:
        kind = DeviceTransport
        way = "directly"
    if comm.rank == 0:
        logger.info("device arrays travel %s: %s", way, verdict.reason)
    return kind(comm, channels, synchronous)
