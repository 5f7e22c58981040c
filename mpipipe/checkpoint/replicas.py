"""Compares parameters and optimizer state over replicas, and places of tied ones.

    rank 0   hash of each array  ->  one number  |                 all alike: go on
    rank 1   hash of each array  ->  one number  |  one exchange
    rank 2   hash of each array  ->  one number  |                 else: hashes by name, an error

A hash is BLAKE2b of 64 bits over the bytes of an array, with its dtype and shape, computed on the
host: copying arrays of a GPU there takes less time than hashing.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.checkpoint.contents import Optimizer, contents_of, state_names
from mpipipe.checkpoint.tensor_files import PIECE_BYTES
from mpipipe.comm import Mesh
from mpipipe.errors import ReplicaError
from mpipipe.job import group_of, raise_on_all, rank_list
from mpipipe.optim import StateShard
from mpipipe.stages import as_stages

WHAT = "checkpoint.check_replicas"
LISTED = 4  # arrays that an error writes out
ABSENT = "absent"


class Hashes(NamedTuple):
    """The hashes of a rank at place `pipe`, by name, and names that are one parameter."""

    pipe: int
    host: str
    hashes: dict[str, str]
    ties: dict[str, list[str]]  # kind and key -> names


class Difference(NamedTuple):
    """One array, and which ranks have which hash of it."""

    name: str
    ranks: dict[str, list[int]]

    @property
    def odd(self) -> list[int]:
        """The ranks that differ from most others; all of them where no value has a majority."""
        everyone = sorted(rank for ranks in self.ranks.values() for rank in ranks)
        most = max(self.ranks.values(), key=len)
        others = [rank for rank in everyone if rank not in most]
        return others if others and len(most) > len(others) else everyone

    def __str__(self) -> str:
        sides = sorted(self.ranks.items(), key=lambda side: (len(side[1]), side[1]))
        return f"{self.name} is " + ", ".join(
            f"{value} on {rank_list.named(ranks)}" for value, ranks in sides
        )


def check_replicas(mesh: Mesh, stages: Sequence[Any], optimizer: Optimizer | None = None) -> None:
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
        held = _held(mesh, stages, optimizer)
    steps = None if optimizer is None else optimizer.steps
    table = group.agree(
        WHAT, (("steps of the optimizer", steps),), [_number(held.hashes), bool(held.ties)]
    )
    numbers: dict[int, set[int]] = {}
    for rank, (number, _) in enumerate(table.tolist()):
        numbers.setdefault(mesh.coords_of(rank).pipe, set()).add(number)
    differ = {pipe for pipe, several in numbers.items() if len(several) > 1}
    if not differ and not table[:, 1].any():
        return
    if held.pipe not in differ:
        tied = {name for some in held.ties.values() for name in some}
        held = held._replace(
            hashes={name: value for name, value in held.hashes.items() if name in tied}
        )
    everyone = group.gather(f"{WHAT}: the names", held)
    differences = compare(everyone)
    if differences:
        raise_on_all(min(differences[0].odd), _error(differences, everyone), group)


def compare(everyone: Sequence[Hashes]) -> list[Difference]:
    """Find what differs between ranks with the same stages, and between places of a tied parameter.

    Those differences that name few ranks come first.
    """
    # name of arrays that must be equal -> rank -> its hashes
    values: dict[str, dict[int, set[str]]] = {}
    for pipe in sorted({held.pipe for held in everyone}):
        same = {rank: held.hashes for rank, held in enumerate(everyone) if held.pipe == pipe}
        for name in sorted(set().union(*same.values())):
            values[name] = {rank: {hashes.get(name, ABSENT)} for rank, hashes in same.items()}
    for key in sorted({key for held in everyone for key in held.ties}):
        holders = {rank: held for rank, held in enumerate(everyone) if key in held.ties}
        names = sorted({name for held in holders.values() for name in held.ties[key]})
        values[" = ".join(names)] = {
            rank: {held.hashes[name] for name in held.ties[key]} for rank, held in holders.items()
        }
    differences = []
    for name, hashes in values.items():
        if len(set().union(*hashes.values())) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, several in hashes.items():
                ranks.setdefault(" and ".join(sorted(several)), []).append(rank)
            differences.append(Difference(name, ranks))
    return sorted(differences, key=lambda difference: len(difference.odd))


def _held(mesh: Mesh, stages: Sequence[Any], optimizer: Optimizer | None) -> Hashes:
    everything = contents_of(stages, optimizer)
    hashes = {}
    whole = {
        name: array.copy if isinstance(array, StateShard) else array
        for name, array in everything.items()
    }
    own = state_names(stages)  # each replica has its own
    contents = {
        name: array for name, array in whole.items() if array is not None and name not in own
    }
    # A tied parameter is one array for all its places on a rank.
    known: dict[tuple[int, str, Shape], str] = {}
    for name, array in contents.items():
        place = arrays.address(array), array.dtype.name, array.shape
        hashes[name] = known[place] = known.get(place) or hash_of(array)
    ties: dict[str, list[str]] = {}
    kinds = dict.fromkeys(name.split("/", 1)[0] for name in contents)
    for stage in as_stages(stages):
        for key, names in stage.ties.items():
            for kind in kinds:
                held = [f"{kind}/{name}" for name in names if f"{kind}/{name}" in contents]
                if held:  # not every optimizer has every kind of state for every parameter
                    ties.setdefault(f"{kind}/{key}", []).extend(held)
    return Hashes(mesh.coords.pipe, socket.gethostname(), hashes, ties)


def hash_of(array: Array) -> str:
    """Return the hash of an array's bytes, dtype and shape, as 16 hexadecimal digits."""
    total = blake2b(f"{array.dtype.name}{list(array.shape)}".encode(), digest_size=8)
    for _, piece in arrays.host_pieces([array], PIECE_BYTES):
        total.update(piece.data)
    return total.hexdigest()


def _number(hashes: Mapping[str, str]) -> int:
    """Return a number from 0 to 2^63 - 1 for all hashes of a rank."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(hashes.items()))
    return (
        int.from_bytes(
            blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "big"
        )
        >> 1
    )


def _error(differences: Sequence[Difference], everyone: Sequence[Hashes]) -> ReplicaError:
    first = differences[0]
    odd = differences[0].odd
    others = len(differences) - 1
    more = len(differences) - LISTED
    texts = [*map(str, differences[:LISTED]), *([f"and {more} arrays more"] if more > 0 else [])]
    hosts = rank_list.grouped((rank, everyone[rank].host) for rank in odd)
    return ReplicaError(
        f"replicas differ in {first.name}" + (f" and {others} arrays more" if others else ""),
        rank=odd[0] if len(odd) == 1 else rank_list.numbers(odd),
        found="; ".join(texts),
        expected="the same bytes on all ranks with the same stages, and in all places of a tied "
        "parameter",
        remedy="go on from a checkpoint of before, and change parameters on all ranks alike; "
        "where nothing in the "
        f"program does, test the memory and the processor of {'; '.join(hosts)}",
    )
