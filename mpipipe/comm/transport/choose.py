"""Which transport carries the arrays of a rank."""

from __future__ import annotations

import logging

from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.gpu_aware import GpuAwareness
from mpipipe.comm.transport.host import CHUNK_BYTES, PIECE_BYTES, HostTransport, Transport
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.job import Communicator, RankGroup, group_of

logger = logging.getLogger("mpipipe")


def make_transport(
    comm: Communicator,
    channels: int = 1,
    synchronous: bool = False,
    device: str = "cpu",
    verdict: GpuAwareness | None = None,
    group: RankGroup | None = None,
) -> Transport:
    """Return the transport for arrays on this rank's device, "cpu" or "cuda"; collective. Ranks may differ.

    The ranks agree in `group`, by default in that of `comm`. `verdict` is what gpu_aware.detect said, asked by default
    where a rank computes on a GPU.
    """
    group = group_of(comm) if group is None else group
    everyone = group.gather("making a transport", (device, verdict))
    if all(other == "cpu" for other, _ in everyone):
        return HostTransport(comm, channels, synchronous)
    verdicts = [other for _, other in everyone if other is not None] or [gpu_aware.detect(comm, group)]
    verdict = next((other for other in verdicts if not other.direct), verdicts[0])
    if comm.rank == 0:
        way = "directly" if verdict.direct else "by the host"
        logger.info("device arrays travel %s: %s", way, verdict.reason)
    if device == "cpu":
        return HostTransport(comm, channels, synchronous, PIECE_BYTES if verdict.direct else CHUNK_BYTES, typed=False)
    kind = DeviceTransport if verdict.direct else StagedTransport
    return kind(comm, channels, synchronous)
