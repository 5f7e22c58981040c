"""How many threads each rank takes, so that all cores of a host compute and none has two threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from mpipipe.comm.binding import own_cores, parse_cores
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.launcher import launcher_size

TOPOLOGY = Path("/sys/devices/system/cpu")


def share_of_cores() -> int:
    """Return how many BLAS threads this rank can take; collective over COMM_WORLD if a launcher promises several ranks.

    Two hardware threads of a core count as one: products of matrices keep a core busy with one.
    """
    mine = cores_of(parse_cores(own_cores()))
    if launcher_size(os.environ) is None:
        return max(1, len(mine))
    return fair_share(group_of(), mine)


def fair_share(group: Group, cores: Collection[int]) -> int:
    """Return this rank's part, at least one, of the cores that it shares with other ranks of the group; collective."""
    places = group.gather("the cores of all ranks", (socket.gethostname(), sorted(cores)))
    return fair_shares(places)[group.rank]


def cores_of(threads: Collection[int], topology: Path = TOPOLOGY) -> frozenset[int]:
    """Return the cores of hardware threads, each named by its first thread; a thread itself if its core is unknown."""
    return frozenset(_first_sibling(thread, topology) for thread in threads)


def _first_sibling(thread: int, topology: Path) -> int:
    try:
        siblings = parse_cores((topology / f"cpu{thread}/topology/thread_siblings_list").read_text().strip())
    except (OSError, ValueError):
        return thread
    return min(siblings, default=thread)


def fair_shares(places: Sequence[tuple[str, Collection[int]]]) -> list[int]:
    """Return for each rank its part of the cores that it shares with other ranks, at least one.

    Parameters
    ----------
    places : host of each rank, and the cores that it may run on; no cores if they are not known

    Examples
    --------
    >>> from mpipipe.comm.threads import fair_shares
    >>> fair_shares([("n1", range(8)), ("n1", range(8)), ("n2", range(8))])
    [4, 4, 8]
    >>> fair_shares([("n1", [0]), ("n1", [0]), ("n1", [1, 2])])
    [1, 1, 2]
    """
    shares = [1] * len(places)
    for host in {host for host, _ in places}:
        rest = {rank: frozenset(cores) for rank, (name, cores) in enumerate(places) if name == host and cores}
        while rest:
            first, cores = rest.popitem()
            ranks = [first]
            while joined := [rank for rank, own in rest.items() if own & cores]:
                cores = cores.union(*(rest.pop(rank) for rank in joined))
                ranks += joined
            for rank in ranks:
                shares[rank] = max(1, min(len(places[rank][1]), len(cores) // len(ranks)))
    return shares
