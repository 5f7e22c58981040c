"""A gather to rank 0 alone, for objects that are too large to be on all ranks, as `Group.gather` would have them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from mpipipe.job.group import Group
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator


def collect(group: Group, comm: Communicator, value: Any) -> list[Any] | None:
    """Return the values of all ranks in rank order on rank 0, and None on the others; collective.

    Parameters
    ----------
    group : the ranks
    comm : a communicator of the same ranks, on which no other messages are under way
    value : any picklable object of this rank
    """
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = group.agree("collecting what all ranks have", values=[content.size])[:, 0].tolist()
    with group.failing("collecting what all ranks have"):
        if comm.rank > 0:
            group.wait(own(comm.Isend(content, 0, 0)), "rank 0, to take what this rank has", peer=0)
            return None
        found = [value]
        for peer in range(1, comm.size):
            buffer = np.empty(sizes[peer], np.uint8)
            group.wait(own(comm.Irecv(buffer, peer, 0)), f"what rank {peer} has", peer=peer)
            found.append(pickle.loads(buffer.tobytes()))
    return found
