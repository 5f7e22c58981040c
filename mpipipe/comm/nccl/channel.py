"""A communicator of NCCL and the stream that is its own, on which all runs in order.

NCCL lets operations of one communicator run one after the other, whatever their streams. So each
group has one of its own for its sums.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray, Event
from mpipipe.errors import BackendError
from mpipipe.job import NCCL, RankGroup, ThreadTask, found_by_all, keep_forever, runtime


class Channel:
    """One rank's end of a communicator of NCCL; the constructor and `close` are collective.

    `purpose` is what it is for, in errors. All ranks begin with a sum of a zero: NCCL connects
    ranks when they first talk, and the host waits for that. Where this rank cannot open it, it
    raises BackendError; the group ends then, and the others raise PeerError.
    """

    def __init__(self, group: RankGroup, purpose: str) -> None:
        self.group = group
        self.stream = arrays.side_stream()
        self.ended = False
        what = f"opening NCCL for {purpose}"
        identity = None
        if group.rank == 0:
            identity = bytes(arrays.nccl().get_unique_id())
        identity = group.broadcast(what, identity)
        zeros = arrays.zeros((1,), np.dtype(np.float32), "cuda")
        arrays.stream().synchronize()

        def connect() -> None:
            self.communicator = arrays.nccl().NcclCommunicator(group.size, identity, group.rank)
            # Its end is `close` or `abort`, not the collector's, which would wait there.
            keep_forever(self.communicator)
            self._add(zeros)
            self.stream.synchronize()

        task = NcclTask(connect, what)
        with group.failing(what):
            group.wait(task, what)
            task.value()
        group.agree(what)

    def add(self, part: DeviceArray, after: Event) -> Event:
        """Put a sum on the stream, after an event; returns the event after it."""
        with self.stream:
            arrays.wait_for(after)
            self._add(part)
            return arrays.record()

    def _add(self, part: DeviceArray) -> None:
        kind, several = nccl_type(part)
        place = arrays.address(part)
        count = part.size * several
        add = arrays.nccl().NCCL_SUM
        self.communicator.allReduce(place, place, count, kind, add, self.stream.ptr)

    def check(self) -> None:
        """Raise BackendError if NCCL has noticed a failure; never waits."""
        if self.ended:
            return
        try:
            self.communicator.check_async_error()
        except Exception as error:  # NcclError, and what CuPy makes of a code that it does not know
            raise BackendError(
                f"NCCL reports a failure ({error})",
                remedy="look at what the other ranks report; NCCL_DEBUG=INFO makes NCCL say more",
            ) from None

    def abort(self) -> None:
        """After a failure: let kernels that wait for other ranks end. Returns at once."""
        if not self.ended:
            self.ended = True
            keep_forever(self)
            NcclTask(self.communicator.abort, "the abort of NCCL's communicators")

    def close(self) -> None:
        """Free the communicator, on which nothing is under way."""
        if not self.ended:
            self.ended = True
            what = "the end of NCCL's communicators"
            task = NcclTask(self.communicator.destroy, what)
            self.group.wait(task, what)
            task.value()


def nccl_type(part: DeviceArray) -> tuple[int, int]:
    """Return NCCL's type of an array that it can add, and its elements in one of ours."""
    kind = arrays.nccl_type(part.dtype)
    assert kind is not None  # NcclSums.takes was asked
    return kind


# -- Calls of NCCL that keep the host until other ranks come, made on a thread ---------------------
#
# The rank itself waits in the one loop (wait.py), where it learns of failures and can give up. The
# thread then stays inside NCCL for as long as the process lives, and keeps no other: it is a
# daemon. CuPy lets go of Python's lock there.


Result = TypeVar("Result")


class NcclTask(ThreadTask[Result]):
    """A call of NCCL in a thread, on this thread's GPU; `Test()` is true once it has ended."""

    def __init__(self, function: Callable[[], Result], what: str) -> None:
        self.what = what
        gpu = arrays.current_gpu()

        def work() -> Result:
            arrays.use_gpu(gpu)
            return function()

        super().__init__(work, f"mpipipe {what}")

    def Test(self) -> bool:
        return self.ended

    def value(self) -> Result:
        """Return the result, once `Test()` was true; raise BackendError if the call has raised."""
        if self.error is not None:
            raise BackendError(
                f"{self.what} failed",
                found=f"{type(self.error).__name__}: {self.error}",
                remedy="NCCL_DEBUG=INFO makes NCCL say more; MPIPIPE_NCCL=off does without it",
            ) from self.error
        return self.result


# -- Whether NCCL is used: one answer for all ranks, from what each of them has --------------------
#
# NCCL needs a GPU of its own for every rank: its kernels wait for each other, and two processes on
# one GPU take turns. So the facts of all ranks of a pipeline and of its replicas are put together,
# and every rank judges the same facts.


CALL = "asking whether NCCL can be used"


class Facts(NamedTuple):
    """What one rank says of NCCL."""

    rank: int  # its number in COMM_WORLD
    setting: str  # MPIPIPE_NCCL
    problem: str  # why this rank by itself cannot use NCCL; "" where it can
    host: str = ""
    gpu: str = ""  # its PCI address
    version: str = ""  # NCCL's


class NcclChoice(NamedTuple):
    """Whether NCCL carries sums over replicas, and why or why not."""

    sums: bool
    reason: str

    def __str__(self) -> str:
        if self.sums:
            return f"sums over replicas: {self.reason}"
        return f"not used: {self.reason}"


def agree_on_nccl(groups: Sequence[RankGroup], device: str) -> NcclChoice:
    """Choose for all ranks of these groups, along one axis or two; collective over each.

    All ranks raise BackendError where MPIPIPE_NCCL=on and NCCL cannot be used.
    """
    everyone = [facts_of(groups[0], device)]
    for group in groups:
        everyone = [*chain.from_iterable(group.gather(CALL, everyone))]
    try:
        return judge(sorted(set(everyone)))
    except BackendError as error:
        raise found_by_all(error, groups) from None


def facts_of(group: RankGroup, device: str) -> Facts:
    """What this rank says of itself; the arguments are those of `agree_on_nccl`."""
    rank = group.world_rank
    setting = os.environ.get(NCCL.name) or "auto"
    problem = ""
    if setting == "off":
        problem = f"{NCCL.name}=off"
    elif runtime.in_process(group.comm):
        problem = "the ranks are threads of one process"
    elif device == "cpu":
        problem = "it computes on the CPU"
    else:
        try:
            version = arrays.nccl().get_version()
            text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
            return Facts(rank, setting, "", socket.gethostname(), arrays.bus_id(), text)
        except Exception as error:  # a library that does not work raises what it likes
            problem = getattr(error, "message", repr(error))
    return Facts(rank, setting, problem)


def judge(everyone: Sequence[Facts]) -> NcclChoice:
    """Return the choice that follows from what all ranks say; may raise BackendError."""
    refusals = _refusals(everyone)
    if refusals:
        rank, reason = refusals[0]
        if any(facts.setting == "on" for facts in everyone):
            raise BackendError(
                f"{NCCL.name}=on, and NCCL cannot be used",
                rank=rank,
                found=reason,
                expected="NCCL, and a GPU of its own, on every rank",
                remedy="start one rank for each GPU, install what is missing, or set "
                f"{NCCL.name}=auto",
            )
        return NcclChoice(False, f"on rank {rank}: {reason}")
    if len(everyone) == 1:
        return NcclChoice(False, "one rank has no other to talk to")
    version = everyone[0].version
    text = f"each of the {len(everyone)} ranks has a GPU of its own and NCCL {version}"
    return NcclChoice(True, text)


def _refusals(everyone: Sequence[Facts]) -> list[tuple[int, str]]:
    """(rank, reason) of each rank that is in the way."""
    first: dict[tuple[str, str], int] = {}
    version = next((facts.version for facts in everyone if not facts.problem), "")
    refusals = []
    for facts in everyone:
        owner = first.setdefault((facts.host, facts.gpu), facts.rank)
        problem = facts.problem
        if not problem and owner != facts.rank:
            problem = f"it shares GPU {facts.gpu} of {facts.host} with rank {owner}"
        elif not problem and facts.version != version:
            problem = f"it has NCCL {facts.version}, and others {version}"
        if problem:
            refusals.append((facts.rank, problem))
    return refusals
