"""Whether NCCL is used: one answer for all ranks, from what each of them has.

NCCL needs a GPU of its own for every rank: its kernels wait for each other, and two processes on one GPU take turns. So
the facts of all ranks of a pipeline and of its replicas are put together, and every rank judges the same facts.

NCCL's kernels hold processors of the GPU while they wait. `limit_kernels` bounds how many each may take, by NCCL's own
variables, which the user may set otherwise; `judge` refuses where the kernels that may wait at once would take more
than half of a GPU, since the work that they wait for must find room (comm/transport/nccl.py has the argument).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.comm import rank_list, runtime
from mpipipe.comm.consensus import Ballot
from mpipipe.comm.group import Group
from mpipipe.comm.settings import GPU_DIRECT, NCCL
from mpipipe.errors import BackendError, MpipipeError

CALL = "asking whether NCCL can be used"
LIMITS = {"NCCL_MAX_CTAS": "16", "NCCL_MAX_P2P_NCHANNELS": "4"}  # thread blocks of one sum, and of one message
ON, OFF = "on", "off"


class Facts(NamedTuple):
    """What one rank says.

    Attributes
    ----------
    rank : int
        In COMM_WORLD.
    setting : str
        MPIPIPE_NCCL.
    problem : str
        Why this rank by itself cannot use NCCL; "" where it can.
    host, gpu : str
        Where it computes: the GPU by its PCI address.
    version : str
        Of NCCL.
    room : int
        Multiprocessors of the GPU.
    needed : int
        Most thread blocks that NCCL's kernels take there while they wait.
    direct : str
        MPIPIPE_GPU_DIRECT, by which a user says how messages of device arrays travel.
    """

    rank: int
    setting: str
    problem: str
    host: str = ""
    gpu: str = ""
    version: str = ""
    room: int = 0
    needed: int = 0
    direct: str = ""


class Choice(NamedTuple):
    """Whether NCCL carries sums, and messages, and why or why not."""

    sums: bool
    messages: bool
    reason: str

    def __str__(self) -> str:
        used = ["sums over replicas"] * self.sums + ["messages"] * self.messages
        return f"{' and '.join(used) or 'not used'}: {self.reason}"


def choose(groups: Sequence[Group], device: str, messages: int = 0) -> Choice:
    """The choice for all ranks of these groups; collective over each of them.

    Parameters
    ----------
    groups : sequence of Group
        One group, or those along the two axes of a grid.
    device : str
        "cpu" or "cuda", where this rank computes.
    messages : int
        Most messages that one rank may have under way at once, sent and received.

    Raises
    ------
    BackendError
        On all ranks, where MPIPIPE_NCCL=on and NCCL cannot be used.
    """
    everyone = [facts_of(groups[0], device, messages)]
    for group in groups:
        everyone = [facts for some in group.gather(CALL, everyone) for facts in some]
    everyone = sorted(set(everyone))
    try:
        return judge(everyone)
    except MpipipeError as error:  # every rank finds it in the same facts
        ballot = Ballot(CALL)
        ballot.refuse(error)
        for group in groups:
            ballot.cast(group)
        ballot.decide()
        raise


def facts_of(group: Group, device: str, messages: int) -> Facts:
    """What this rank says of itself; the arguments are those of `choose`."""
    rank, setting = group.world_rank, os.environ.get(NCCL.name) or "auto"
    if setting == OFF:
        return Facts(rank, setting, f"{NCCL.name}=off")
    if runtime.in_process(group.comm):
        return Facts(rank, setting, "the ranks are threads of one process")
    if device == "cpu":
        return Facts(rank, setting, "it computes on the CPU")
    try:
        version = arrays.nccl().get_version()
        sum_blocks, message_blocks = (int(os.environ.get(name) or value) for name, value in LIMITS.items())
    except Exception as error:  # a library that is there and does not work raises what it likes
        return Facts(rank, setting, error.message if isinstance(error, MpipipeError) else repr(error))
    text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return Facts(
        rank,
        setting,
        problem="",
        host=socket.gethostname(),
        gpu=arrays.bus_id(),
        version=text,
        room=arrays.multiprocessors(),
        needed=sum_blocks + messages * message_blocks,
        direct=os.environ.get(GPU_DIRECT.name, ""),
    )


def judge(everyone: Sequence[Facts]) -> Choice:
    """The choice that follows from what all ranks say, in the order of their ranks.

    Raises
    ------
    BackendError
        Where a rank asks for NCCL that cannot be used.
    """
    refusals = _refusals(everyone)
    asked = any(facts.setting == ON for facts in everyone)
    if refusals and asked:
        raise BackendError(
            f"{NCCL.name}=on, and NCCL cannot be used",
            rank=rank_list.numbers((rank for rank, _ in refusals), len(everyone)),
            found="; ".join(rank_list.grouped(refusals, len(everyone))),
            expected="NCCL, and a GPU of its own, on every rank",
            remedy=f"start one rank for each GPU, install what is missing, or set {NCCL.name}=auto",
        )
    if refusals:
        (rank, reason), alike = refusals[0], len(refusals) == len(everyone) and len({why for _, why in refusals}) == 1
        return Choice(False, False, reason if alike else f"on rank {rank}: {reason}")
    if len(everyone) == 1:
        return Choice(False, False, "one rank has nobody to talk to")
    reason = f"each of the {len(everyone)} ranks has a GPU of its own and NCCL {everyone[0].version}"
    direct = next((facts.direct for facts in everyone if facts.direct), "")
    if direct and not asked:
        return Choice(True, False, f"{reason}; {GPU_DIRECT.name}={direct} says how messages travel")
    crowded = next((facts for facts in everyone if 2 * facts.needed > facts.room), None)
    if crowded is not None:
        why = f"kernels that wait might take {crowded.needed} of {crowded.room} multiprocessors on rank {crowded.rank}"
        return Choice(True, False, f"{reason}; messages go by MPI: {why} (lower {' or '.join(LIMITS)})")
    return Choice(True, True, reason)


def _refusals(everyone: Sequence[Facts]) -> list[tuple[int, str]]:
    """(rank, reason) of each rank that is in the way."""
    first: dict[tuple[str, str], int] = {}
    version = next((facts.version for facts in everyone if not facts.problem), "")
    refusals = []
    for facts in everyone:
        owner = first.setdefault((facts.host, facts.gpu), facts.rank)
        if facts.problem:
            refusals.append((facts.rank, facts.problem))
        elif owner != facts.rank:
            refusals.append((facts.rank, f"it shares GPU {facts.gpu} of {facts.host} with rank {owner}"))
        elif facts.version != version:
            refusals.append((facts.rank, f"it has NCCL {facts.version}, and others {version}"))
    return refusals


def limit_kernels() -> None:
    """Bound the kernels of NCCL, where the user has not: before its first communicator, which reads these variables."""
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
