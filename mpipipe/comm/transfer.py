"""Parts of arrays that go to other ranks, in one step of all ranks; and back again.

A transfer is a linear map: y on each rank consists of parts of the x of several ranks. Its
transpose takes the same parts the other way. So it gives the gradient of x from that of y, once
parts that were sent twice are added.

    halo, width 1     x    a b c | d e f
                      y  . a b c d | c d e f .

    all-to-all        x  | a b |  | e f |        y  | a e |  | b f |
                         | c d |  | g h |           | c g |  | d h |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm.ring_exchange import RingExchange
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, cached, settings

Index: TypeAlias = tuple[slice, ...]


class PartMove(NamedTuple):
    """The part `give` of x goes to `dest`; the part `take` of y comes from `source`.

    Parts may be empty. All ranks have as many moves, and the `dest` of each has this rank as the
    `source` of its own.
    """

    dest: int
    give: Index
    source: int
    take: Index


def exchange_on(comm: Communicator, device: str) -> RingExchange:
    """Return the one exchange for the transfers on a communicator between arrays on this device.

    Collective the first time. It is closed when `comm` is freed.
    """
    key = "transfer", device
    return cached(
        comm, key, lambda: RingExchange(comm, settings.SYNC_SENDS.is_on, device, what="transfer")
    )


class Transfer:
    """A transfer under way until `finish`; several may be, begun in one order on all ranks.

    `add`: parts are added to what y has by then, which may be of a wider dtype; else they replace
    it. x may not change until the end.
    """

    def __init__(
        self,
        exchange: RingExchange,
        moves: Iterable[PartMove],
        x: Array,
        y: Array,
        *,
        transposed: bool = False,
        add: bool = False,
    ) -> None:
        self.exchange = exchange
        self.y = y
        self.add = add
        self.bytes_sent = 0
        self._arriving: list[tuple[Array, Array]] = []  # (part, its place)
        for move in moves:
            if transposed:
                move = PartMove(move.source, move.take, move.dest, move.give)
            dest, give, source, take = move
            part = x[give]
            place = y[take]
            if dest == exchange.group.rank:
                self._arriving.append((part, place))
                continue
            outgoing = incoming = None
            if part.size:
                outgoing = arrays.in_c_order(part)
                self.bytes_sent += part.nbytes
            if place.size:
                incoming = place
                if add or place.dtype != x.dtype or not place.flags.c_contiguous:
                    incoming = arrays.empty(place.shape, x.dtype, arrays.device_of(x))
                    self._arriving.append((incoming, place))
            exchange.start("overlap", outgoing, dest, incoming, source)

    def finish(self) -> Array:
        """Wait for all parts, and return y."""
        self.exchange.finish()
        for part, place in self._arriving:
            arrays.strided_copy(part, place, self.add)
        self._arriving = []
        return self.y


# -- Which parts go where --------------------------------------------------------------------------


def along(axis: int, start: int, stop: int | None) -> Index:
    """Return the index of start ... stop - 1 along one axis."""
    return (*(slice(None),) * axis, slice(start, stop))


MOST_TURNS = 16  # a halo has so many times the points of the whole axis at most


@lru_cache(maxsize=256)
def halo_of(
    lengths: tuple[int, ...], rank: int, axis: int, width: tuple[int, int], periodic: bool
) -> tuple[list[PartMove], bool]:
    """Return the moves that fill a rank's halo, and whether rows lie beyond the ends.

    Shards have these lengths along `axis`, in rank order. In y the rank's own shard lies between
    the two parts of the halo. It may reach over several ranks, and a periodic one around the whole.
    """
    size = len(lengths)
    moves = []
    beyond = False
    if max(width) > MOST_TURNS * max(sum(lengths), not periodic):
        raise ArgumentError(
            "a halo is far wider than its axis",
            found=f"width {width}, shards of {list(lengths)} points",
            expected=f"at most {MOST_TURNS} times the points of all shards",
        )

    def rows_by_hop(of: int, direction: int, reach: int) -> dict[int, int]:
        rows = {}
        hop = 1
        while reach and (periodic or 0 <= of + direction * hop < size):
            rows[hop] = min(reach, lengths[(of + direction * hop) % size])
            reach -= rows[hop]
            hop += 1
        return rows

    for direction, reach in zip((-1, 1), width):
        table = [rows_by_hop(other, direction, reach) for other in range(size)]
        filled = 0
        for hop in range(1, max(map(len, table)) + 1):
            dest = (rank - direction * hop) % size
            source = (rank + direction * hop) % size
            out = table[dest].get(hop, 0)
            into = table[rank].get(hop, 0)
            give = 0
            take = width[0] + lengths[rank] + filled
            if direction < 0:
                give = lengths[rank] - out
                take = width[0] - filled - into
            outward = along(axis, give, give + out)
            moves.append(PartMove(dest, outward, source, along(axis, take, take + into)))
            filled += into
        beyond |= filled < reach
    return moves, beyond


def all_to_all(
    rank: int, gives: Sequence[Sequence[Index]], takes: Sequence[Sequence[Index]]
) -> list[PartMove]:
    """Return the moves of an all-to-all: `gives` by receiver, `takes` by sender."""
    size = len(gives)
    moves = []
    for shift in range(size):
        dest = (rank + shift) % size
        source = (rank - shift) % size
        for give, take in zip(gives[dest], takes[source]):
            moves.append(PartMove(dest, give, source, take))
    return moves
