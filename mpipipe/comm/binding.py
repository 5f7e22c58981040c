"""Which cores each rank may run on, and whether ranks share them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpipipe.comm import rank_list
from mpipipe.wording import counted


def own_cores() -> str:
    """Return the cores that this process may run on; empty if the system does not say.

    Returns
    -------
    str
        As `cores_text` writes them.

    Examples
    --------
    >>> from mpipipe.comm import binding
    >>> len(binding.parse_cores(binding.own_cores())) >= 1
    True
    """
    return cores_text(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ""


def oversubscribed(binding: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence if more ranks than cores share cores, such as "4 ranks share 2 cores"; else None.

    It names the cores with the most ranks on each.

    Parameters
    ----------
    binding : sequence of mappings
        `rank`, `host` and `cores` of each rank, as in what `gather` returns.

    Returns
    -------
    str or None
        It has the host and the ranks, unless it is about all ranks.

    Examples
    --------
    >>> from mpipipe.comm.binding import oversubscribed
    >>> oversubscribed([{"rank": rank, "host": "n1", "cores": "0-1"} for rank in range(4)])
    '4 ranks share 2 cores'
    >>> oversubscribed([{"rank": rank, "host": "n1", "cores": cores} for rank, cores in enumerate(["0", "0", "1-7"])])
    'ranks 0-1 share 1 core on n1'
    >>> oversubscribed([{"rank": rank, "host": "n1", "cores": str(rank)} for rank in range(4)])
    """
    worst: tuple[float, list[int], int, str] = 1.0, [], 0, ""
    for host in sorted({place["host"] for place in binding}):
        here = {place["rank"]: parse_cores(place["cores"]) for place in binding if place["host"] == host}
        for cores in {frozenset().union(*here.values()), *here.values()}:
            ranks = [rank for rank, own in here.items() if own and own <= cores]
            if cores and len(ranks) / len(cores) > worst[0]:
                worst = len(ranks) / len(cores), ranks, len(cores), host
    _, ranks, count, host = worst
    if not ranks:
        return None
    text = f"share {counted(count, 'core')}"
    if len(ranks) == len(binding):
        return f"{len(ranks)} ranks {text}"
    return f"{rank_list.named(ranks)} {text} on {host}"


def oversubscribed_threads(binding: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence if ranks have more BLAS threads than cores; else None.

    It names the cores with the most threads on each. Ranks with one thread each are the business of `oversubscribed`.

    Parameters
    ----------
    binding : sequence of mappings
        `rank`, `host`, `cores` and `threads` of each rank, as in what `environment.gather` returns.

    Returns
    -------
    str or None
        With the ranks and the host.

    Examples
    --------
    >>> from mpipipe.comm.binding import oversubscribed_threads
    >>> oversubscribed_threads([{"rank": 0, "host": "n1", "cores": "0", "threads": 4}])
    'rank 0 has 4 BLAS threads on 1 core of n1'
    >>> oversubscribed_threads([{"rank": rank, "host": "n1", "cores": "0-7", "threads": 4} for rank in range(4)])
    'ranks 0-3 have 16 BLAS threads on 8 cores of n1'
    """
    worst: tuple[float, list[int], int, int, str] = 1.0, [], 0, 0, ""
    for host in sorted({place["host"] for place in binding}):
        here = {place["rank"]: place for place in binding if place["host"] == host}
        own = {rank: parse_cores(place["cores"]) for rank, place in here.items()}
        for cores in {frozenset().union(*own.values()), *own.values()}:
            ranks = [rank for rank, allowed in own.items() if allowed and allowed <= cores]
            several = [rank for rank in ranks if here[rank]["threads"] > 1]
            threads = sum(here[rank]["threads"] for rank in ranks)
            if several and cores and threads / len(cores) > worst[0]:
                worst = threads / len(cores), ranks, threads, len(cores), host
    _, ranks, threads, count, host = worst
    if not ranks:
        return None
    verb = "has" if len(ranks) == 1 else "have"
    return f"{rank_list.named(ranks)} {verb} {threads} BLAS threads on {counted(count, 'core')} of {host}"


def cores_text(cores: Sequence[int]) -> str:
    """Write numbers of cores as Linux does.

    Parameters
    ----------
    cores : sequence of int
        In any order.

    Returns
    -------
    str
        Runs, with commas between them.

    Examples
    --------
    >>> from mpipipe.comm.binding import cores_text
    >>> cores_text([8, 0, 1, 2, 3])
    '0-3,8'
    """
    return ",".join(rank_list.runs(cores))


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers that `cores_text` has written.

    Parameters
    ----------
    text : str
        Such as "0-3,8".

    Returns
    -------
    frozenset of int
        The cores.

    Examples
    --------
    >>> from mpipipe.comm.binding import parse_cores
    >>> sorted(parse_cores("0-3,8"))
    [0, 1, 2, 3, 8]
    """
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)
