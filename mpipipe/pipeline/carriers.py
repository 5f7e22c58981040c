"""The choice of what carries the messages and sums of a pipeline: MPI, or NCCL between GPUs; the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpipipe.comm import settings
from mpipipe.comm.group import Group
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.nccl.choice import Choice, choose
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.transport.nccl import Pair

logger = logging.getLogger("mpipipe")


def choose_nccl(
    pipe: Group, replicas: Group | None, device: str, devices: Sequence[str], pairs: Sequence[Pair], check: bool = False
) -> Choice:
    """Return whether NCCL carries messages and sums; collective if there are replicas or GPUs.

    Parameters
    ----------
    pipe, replicas : group of the pipeline's ranks, and group of the replicas or None
    device, devices : "cpu" or "cuda": of this rank, and of all ranks of the pipeline
    pairs : ranks that exchange messages
    check : whether the host looks at all arrays: it would wait for a device that waits for another rank
    """
    if check:
        return Choice(False, False, "check mode looks at arrays on the host")
    if replicas is None and "cuda" not in devices and not settings.nccl_is_demanded():
        return Choice(False, False, "the ranks compute on the CPU")
    groups = [pipe] if replicas is None else [pipe, replicas]
    choice = choose(groups, device, sum(pipe.rank in pair for pair in pairs))
    if device == "cuda" and pipe.rank == 0:
        logger.info("NCCL: %s", choice)
    return choice


def make_mailbox(pipe: Group, channels: int, device: str, devices: Sequence[str], pairs: Sequence[Pair]) -> Mailbox:
    """Return the mailbox of this rank; `pairs` are the ranks whose messages go by NCCL. Collective."""
    verdict = gpu_aware.detect(pipe.comm, pipe) if "cuda" in devices else None
    synchronous = settings.synchronous_sends()
    return Mailbox(make_transport(pipe.comm, channels, synchronous, device, verdict, group=pipe, pairs=pairs), pipe)
