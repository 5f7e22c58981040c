"""Which transport carries the arrays of a rank."""

from __future__ import annotations

import logging

from mpipipe.comm.group import group_of
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.direct import DirectTransport
from mpipipe.comm.transport.host import CHUNK_BYTES, PIECE_BYTES, HostTransport
from mpipipe.comm.transport.staged import StagedTransport

logger = logging.getLogger("mpipipe")


def make_transport(comm, channels: int = 1, synchronous: bool = False, device: str = "cpu", verdict=None, group=None):
    """The transport for arrays on this rank's device; collective.

    Parameters
    ----------
    comm, channels, synchronous : as for HostTransport
    device : "cpu" or "cuda", where this rank computes; ranks may differ
    verdict : what gpu_aware.detect said; by default it is asked where a rank computes on a GPU
    group : the comm.group.Group in which the ranks agree; by default that of `comm`
    """
    group = group_of(comm) if group is None else group
    facts = group.gather("making a transport", (device, verdict))
    if all(other == "cpu" for other, _ in facts):
        return HostTransport(comm, channels, synchronous)
    given = [other for _, other in facts if other is not None] or [gpu_aware.detect(comm, group)]
    verdict = next((other for other in given if not other.direct), given[0])
    if comm.rank == 0:
        logger.info("device arrays travel %s: %s", "directly" if verdict.direct else "by the host", verdict.reason)
    if device == "cpu":
        return HostTransport(comm, channels, synchronous, PIECE_BYTES if verdict.direct else CHUNK_BYTES, typed=False)
    return (DirectTransport if verdict.direct else StagedTransport)(comm, channels, synchronous)
