"""Compares parameters and optimizer state over replicas, and places of tied ones.

A hash is BLAKE2b of 64 bits over the bytes of an array, with its dtype and shape, computed on the
host: copying arrays of a GPU there takes less time than hashing.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.checkpoint.contents import contents_of, state_names
from mpipipe.checkpoint.tensor_files import PIECE_BYTES
from mpipipe.comm import Mesh
from mpipipe.errors import ReplicaError
from mpipipe.job import group_of, raise_on_all, rank_list
from mpipipe.optim import Optimizer, StateShard
from mpipipe.stages import StageLike, as_stages

WHAT = "checkpoint.check_replicas"
LISTED = 4  # arrays that an error writes out
ABSENT = "absent"
ANYWHERE = -1  # the place of tied parameters, which may be on several


class Hashes(NamedTuple):
    """The hashes of a rank at place `pipe`, by name, and what those names are tied by that are."""

    pipe: int
    host: str
    hashes: dict[str, str]
    ties: dict[str, str]  # name -> kind and key


class Difference(NamedTuple):
    """One array, and which ranks have which hash of it."""

    name: str
    ranks: dict[str, list[int]]

    @property
    def odd(self) -> list[int]:
        """The ranks that differ from most others; all of them where no value has a majority."""
        most = max(self.ranks.values(), key=len)
        everyone = set().union(*self.ranks.values())
        others = everyone.difference(most)
        return sorted(others if 0 < len(others) < len(most) else everyone)

    def __str__(self) -> str:
        sides = sorted(self.ranks.items(), key=lambda side: (len(side[1]), side[1]))
        texts = [f"{value} on {rank_list.named(ranks)}" for value, ranks in sides]
        return f"{self.name} is {', '.join(texts)}"


def check_replicas(
    mesh: Mesh, stages: Sequence[StageLike], optimizer: Optimizer | None = None
) -> None:
    """Compare parameters and optimizer state of ranks that must have the same; collective.

    Equal they are, to the bit, as long as nothing has gone wrong: replicas start equal, get the
    same sums of gradients and make the same steps. So do the places of a tied parameter. A bit that
    flipped in the memory of one rank, a faulty unit of a processor or a parameter that one rank has
    changed by itself is found here, and by nothing else.

    Parameters
    ----------
    mesh, stages, optimizer : see `save`
        The ranks of `mesh.replicas` must have the same, but for what a sharded optimizer has shares
        of: its state, and parameters in float32, whose copies in half precision are compared.

    Raises
    ------
    ReplicaError, MismatchError
        On every rank: with the names of the arrays, the ranks that have each value, and the hosts
        of those that differ from most others; or the optimizers have made different numbers of
        steps.
    """
    group = group_of(mesh.comm)
    with group.raise_together(f"{WHAT}: the hashes"):
        local = _held(mesh, stages, optimizer)
    steps = None
    if optimizer is not None:
        steps = optimizer.steps
    group.agree(WHAT, (("steps of the optimizer", steps),))
    everyone = group.gather(f"{WHAT}: the names", local)
    differences = compare(everyone)
    if differences:
        raise_on_all(min(differences[0].odd), _error(differences, everyone), group)


def compare(everyone: Sequence[Hashes]) -> list[Difference]:
    """Find what differs between ranks with the same stages, and between places of a tied parameter.

    Those differences that name few ranks come first.
    """
    # An array must be equal on the ranks at a place, and a tied parameter in all its places.
    values: dict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
    names: dict[tuple[int, str], set[str]] = defaultdict(set)
    for rank, local in enumerate(everyone):
        for name, value in local.hashes.items():
            kinds = [(local.pipe, name)]
            if name in local.ties:
                kinds.append((ANYWHERE, local.ties[name]))
            for kind in kinds:
                values[kind].add((rank, value))
                names[kind].add(name)
    differences = []
    for kind, of_ranks in sorted(values.items()):
        for rank, local in enumerate(everyone):
            if local.pipe == kind[0] and kind[1] not in local.hashes:
                of_ranks.add((rank, ABSENT))
        ranks = rank_list.by_text(sorted(of_ranks))
        if len(ranks) > 1:
            differences.append(Difference(" = ".join(sorted(names[kind])), ranks))
    return sorted(differences, key=lambda difference: len(difference.odd))


def _held(mesh: Mesh, stages: Sequence[object], optimizer: Optimizer | None) -> Hashes:
    replicas_own = state_names(stages)
    hashes: dict[str, str] = {}
    # A tied parameter is one array for all its places on a rank.
    known: dict[tuple[int, str, Shape], str] = {}
    for name, array in contents_of(stages, optimizer).items():
        if isinstance(array, StateShard):
            array = array.copy
        if array is None or name in replicas_own:
            continue
        place = arrays.address(array), array.dtype.name, array.shape
        if place not in known:
            known[place] = hash_of(array)
        hashes[name] = known[place]
    keys = {}
    for stage in as_stages(stages):
        for key, names in stage.ties.items():
            keys.update(dict.fromkeys(names, key))
    ties = {}
    for tied in hashes:
        kind, name = tied.split("/", 1)
        if name in keys:
            ties[tied] = f"{kind}/{keys[name]}"
    return Hashes(mesh.coords.pipe, socket.gethostname(), hashes, ties)


def hash_of(array: Array) -> str:
    """Return the hash of an array's bytes, dtype and shape, as 16 hexadecimal digits."""
    total = blake2b(f"{array.dtype.name}{list(array.shape)}".encode(), digest_size=8)
    for _, piece in arrays.host_pieces([array], PIECE_BYTES):
        total.update(piece.data)
    return total.hexdigest()


def _error(differences: Sequence[Difference], everyone: Sequence[Hashes]) -> ReplicaError:
    odd = differences[0].odd
    what = f"replicas differ in {differences[0].name}"
    if len(differences) > 1:
        what += f" and {len(differences) - 1} arrays more"
    texts = [*map(str, differences[:LISTED])]
    if len(differences) > LISTED:
        texts.append(f"and {len(differences) - LISTED} arrays more")
    hosts = rank_list.grouped((rank, everyone[rank].host) for rank in odd)
    return ReplicaError(
        what,
        rank=odd[0] if len(odd) == 1 else rank_list.numbers(odd),
        found="; ".join(texts),
        expected="the same bytes on all ranks with the same stages, and in all places of a tied "
        "parameter",
        remedy="go on from a checkpoint of before, and change parameters on all ranks alike; where "
        f"nothing in the program does, test the memory and the processor of {'; '.join(hosts)}",
    )
