"""Which cores each rank may run on, and whether ranks share them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from mpipipe.job import rank_list
from mpipipe.job.group import group_of
from mpipipe.job.settings import launcher_size
from mpipipe.text import counted

Place: TypeAlias = (
    "Mapping[str, Any]"  # rank, host, cores and threads, as `environment.gather` has them
)


def own_cores() -> str:
    """Return the cores that this process may run on, as `cores_text`; "" if that is unknown."""
    return cores_text(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ""


def oversubscribed(binding: Sequence[Place]) -> str | None:
    """Return a sentence such as "4 ranks share 2 cores"; None if each rank has its own."""
    ranks, _, count, host = _fullest(binding, len)
    if not ranks:
        return None
    text = f"share {counted(count, 'core')}"
    return (
        f"{len(ranks)} ranks {text}"
        if len(ranks) == len(binding)
        else f"{rank_list.named(ranks)} {text} on {host}"
    )


def oversubscribed_threads(binding: Sequence[Place]) -> str | None:
    """Return a sentence such as "rank 0 has 4 threads on 1 core of n1", or None."""

    def load(places: Sequence[Place]) -> int:
        threads = [place["threads"] for place in places]
        return sum(threads) if max(threads, default=1) > 1 else 0

    ranks, threads, count, host = _fullest(binding, load)
    if not ranks:
        return None
    verb = "has" if len(ranks) == 1 else "have"
    return (
        f"{rank_list.named(ranks)} {verb} {threads} threads on {counted(count, 'core')} of {host}"
    )


def _fullest(
    binding: Sequence[Place], load: Callable[[Sequence[Place]], int]
) -> tuple[list[int], int, int, str]:
    """Return (ranks, load, cores, host) where a core has most load; no ranks if that is 1."""
    worst: float = 1.0
    fullest: tuple[list[int], int, int, str] = [], 0, 0, ""
    for host in sorted({place["host"] for place in binding}):
        places = {place["rank"]: place for place in binding if place["host"] == host}
        own = {rank: parse_cores(place["cores"]) for rank, place in places.items()}
        for cores in {frozenset().union(*own.values()), *own.values()}:
            ranks = [rank for rank, allowed in own.items() if allowed and allowed <= cores]
            total = load([places[rank] for rank in ranks])
            if cores and total / len(cores) > worst:
                worst = total / len(cores)
                fullest = (ranks, total, len(cores), host)
    return fullest


def cores_text(cores: Sequence[int]) -> str:
    """Write numbers of cores as Linux does: "0-3,8"."""
    return ",".join(rank_list.runs(cores))


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers that `cores_text` has written."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# -- How many threads each rank takes, so that no core of a host has two ---------------------------


TOPOLOGY = Path("/sys/devices/system/cpu")
# The quota of a container: microseconds of all cores in so many microseconds.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def share_of_cores() -> int:
    """Return how many threads this rank can take; collective where a launcher gave several."""
    mine = single_cores()
    if launcher_size(os.environ) is None:
        return max(1, len(mine))
    group = group_of()
    places = group.gather("the cores of all ranks", (socket.gethostname(), sorted(mine)))
    return fair_shares(places)[group.rank]


def single_cores() -> list[int]:
    """Return the cores that this process may keep busy, no more than a container's quota."""
    cores = sorted(cores_of(parse_cores(own_cores())))
    with suppress(OSError, ValueError):  # "max" is no number
        quota, period = map(float, QUOTA.read_text().split())
        cores = cores[: max(1, int(quota / period))]
    return cores


def cores_of(threads: Collection[int], topology: Path = TOPOLOGY) -> frozenset[int]:
    """Return the cores of hardware threads, each by its first thread, or itself if unknown."""
    cores: dict[int, Collection[int]] = {thread: {thread} for thread in threads}
    for thread in threads:
        with suppress(OSError, ValueError):
            siblings = (topology / f"cpu{thread}/topology/thread_siblings_list").read_text().strip()
            cores[thread] = parse_cores(siblings) or {thread}
    return frozenset(map(min, cores.values()))


def fair_shares(places: Sequence[tuple[str, Collection[int]]]) -> list[int]:
    """Return each rank's part, at least one, of the cores that it shares with others."""
    shares = [1] * len(places)
    for host in {host for host, _ in places}:
        rest = {
            rank: frozenset(cores)
            for rank, (name, cores) in enumerate(places)
            if name == host and cores
        }
        while rest:
            first, cores = rest.popitem()
            ranks = [first]
            while joined := [rank for rank, own in rest.items() if own & cores]:
                cores = cores.union(*(rest.pop(rank) for rank in joined))
                ranks += joined
            for rank in ranks:
                shares[rank] = max(1, min(len(places[rank][1]), len(cores) // len(ranks)))
    return shares
