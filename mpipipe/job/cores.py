"""Which cores each rank may run on, and whether ranks share them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from mpipipe.job import rank_list
from mpipipe.text import counted

# Rank, host, cores and threads, as `environment.gather` has them.
Place: TypeAlias = Mapping[str, Any]


def own_cores() -> str:
    """Return the cores that this process may run on, as `cores_text`; "" if that is unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    return cores_text(sorted(os.sched_getaffinity(0)))


def oversubscribed(binding: Sequence[Place]) -> str | None:
    """Return a sentence such as "4 threads of ranks 0-3 share 2 cores of n1".

    It is about the cores with most threads each; None if each thread has a core of its own.
    """
    worst = 1.0
    text = None
    on_host: dict[str, list[Place]] = {}
    for place in binding:
        on_host.setdefault(place["host"], []).append(place)
    for host in sorted(on_host):
        places = on_host[host]
        sets = [parse_cores(place["cores"]) for place in places]
        for cores in {frozenset().union(*sets), *sets}:
            ranks = []
            threads = 0
            for place, allowed in zip(places, sets):
                if allowed and allowed <= cores:
                    ranks.append(place["rank"])
                    threads += place["threads"]
            if cores and threads / len(cores) > worst:
                worst = threads / len(cores)
                shared = f"{counted(len(cores), 'core')} of {host}"
                text = f"{threads} threads of {rank_list.named(ranks)} share {shared}"
    return text


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


def single_cores() -> list[int]:
    """Return the cores that this process may keep busy, no more than a container's quota."""
    cores = sorted(cores_of(parse_cores(own_cores())))
    with suppress(OSError, ValueError):  # "max" is no number
        quota, period = map(float, QUOTA.read_text().split())
        cores = cores[: max(1, int(quota / period))]
    return cores


def cores_of(threads: Collection[int], topology: Path = TOPOLOGY) -> frozenset[int]:
    """Return the cores of hardware threads, each by its first thread, or itself if unknown."""
    cores = set()
    for thread in threads:
        core = thread
        with suppress(OSError, ValueError):
            siblings = (topology / f"cpu{thread}/topology/thread_siblings_list").read_text().strip()
            core = min(parse_cores(siblings), default=thread)
        cores.add(core)
    return frozenset(cores)


def fair_shares(places: Sequence[tuple[str, Collection[int]]]) -> list[int]:
    """Return each rank's part, at least one, of the cores that it shares with others.

    Places are hosts and cores; no cores: not known.
    """
    on_host: dict[str, list[Collection[int]]] = {}
    for host, cores in places:
        on_host.setdefault(host, []).append(cores)
    shares = []
    for host, cores in places:
        # all ranks that share cores with this one, also through others
        joined = set(cores)
        before = -1
        while before < len(joined):
            before = len(joined)
            ranks = 0
            for other in on_host[host]:
                if not joined.isdisjoint(other):
                    joined.update(other)
                    ranks += 1
        shares.append(max(1, min(len(cores), len(joined) // max(1, ranks))))
    return shares
