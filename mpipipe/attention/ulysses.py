"""Attention by all-to-all: each rank sees the whole sequence for some heads.

    rank 0   rows 0 1, heads a b                       rank 0   rows 0 1 2 3, head a
    rank 1   rows 2 3, heads a b    <- all-to-all ->   rank 1   rows 0 1 2 3, head b

Jacobs et al., "DeepSpeed Ulysses: system optimizations for enabling training of extreme long
sequence transformer models", arXiv:2309.14509. A rank sends (q + k + v + out) (N - 1) / N of its
shards in a forward, a ring of N ranks (k + v) (N - 1): the fewer the heads of keys, the better the
ring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.attention.kernels import Gradients
from mpipipe.attention.layout import Layout
from mpipipe.attention.local import Local
from mpipipe.attention.ring import Ring
from mpipipe.attention.ring_plan import RingSaved, described
from mpipipe.comm import PartMove, Transfer, all_to_all, exchange_on
from mpipipe.errors import ArgumentError
from mpipipe.text import counted


class UlyssesSaved(NamedTuple):
    """What the forward of `Ulysses` keeps for its backward."""

    local: RingSaved  # heads of this rank
    moves: tuple[list[PartMove], list[PartMove], list[PartMove]]  # moves of q, k and v
    shapes: tuple[Shape, Shape, Shape]  # shapes of q, k and v
    whole: Shape  # output of this rank's heads
    call: int
    out: str  # description of the output


class Ulysses(Ring):
    """Exact attention over a sharded sequence whose ranks divide the heads.

    It takes what `Ring` takes, and gives the same to rounding; errors say "a ring" for its ranks.
    The ranks must divide the heads of queries and those of keys. Work does not depend on the
    layout.

    Parameters
    ----------
    comm, causal, layout, window, segments, scale, seq_len, rotation : Communicator and options
        As for `Ring`; with "sendrecv" arrays go one after the other.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe.attention import Layout, Local, Ulysses
    >>> from mpipipe.job import inprocess
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 12, 2, 8))
    >>> layout = Layout("contiguous", ranks=2, seq_len=12)
    >>> def on_each_rank(comm):
    ...     attend = Ulysses(comm, causal=True, layout=layout)
    ...     return attend.forward(*(layout.shard(x, comm.rank) for x in (q, k, v)))[0]
    >>> out = layout.unshard(inprocess.run(2, on_each_rank))
    >>> bool(np.allclose(out, Local(causal=True).forward(q, k, v)[0]))
    True
    """

    def _forget(self) -> None:
        super()._forget()
        options = self.options
        self._local = Local(options.causal, options.scale, options.window, options.segments)
        self._local.poll = lambda: self.poll()

    def forward(  # type: ignore[override]  # what it saves is its own
        self, q: Array, k: Array, v: Array, segments: np.ndarray | None = None
    ) -> tuple[Array, UlyssesSaved]:
        # a Ring with the same options is another call
        plan, _, call = self._agreed(q, k, v, segments, " all-to-all")
        size = self.group.size
        kv_heads = k.shape[2]
        if kv_heads % size:
            problem = ArgumentError(
                "Ulysses divides heads over ranks, and the heads of keys are not a multiple of "
                "the ranks",
                found=f"{counted(kv_heads, 'head')} of keys, {counted(size, 'rank')}",
                expected=f"a multiple of {size}",
                remedy="use Ring, or other ranks of seq",
            )
            self.agreement.refuse(problem)
        with self.group.failing("the forward of Ulysses"):
            self._check_expected(plan, segments)
            # Keys may be another sequence.
            of_q = self._moves(plan.layout, q.shape[2] // size)
            of_kv = self._moves(plan.keys, kv_heads // size)
            moves = (of_q, of_kv, of_kv)
            wholes = []
            for x, layout in ((q, plan.layout), (k, plan.keys), (v, plan.keys)):
                shape = (len(x), layout.seq_len, x.shape[2] // size, x.shape[3])
                wholes.append(_empty(shape, x))
            self._transfer(*zip((q, k, v), wholes, moves))
            out, kept = self._local.forward(wholes[0], wholes[1], wholes[2], segments)
            mine = _empty((*q.shape[:3], v.shape[3]), q)
            self._transfer((out, mine, of_q), transposed=True)
            return mine, UlyssesSaved(
                kept, moves, (q.shape, k.shape, v.shape), out.shape, call, described(mine)
            )

    def backward(  # type: ignore[override]
        self, dout: Array, saved: UlyssesSaved, room: tuple[Array, Array, Array] | None = None
    ) -> Gradients:
        self.agreement.agree_on_backward(saved.call, dout, saved.out)
        with self.group.failing("the backward of Ulysses"):
            whole = _empty(saved.whole, dout)
            self._transfer((dout, whole, saved.moves[0]))
            of_wholes = self._local.backward(whole, saved.local)
            gradients = Gradients(*(room or [_empty(shape, dout) for shape in saved.shapes]))
            self._transfer(*zip(of_wholes, gradients, saved.moves), transposed=True)
            return gradients

    def _moves(self, layout: Layout, heads: int) -> list[PartMove]:
        """Return the moves from shards of all heads to the whole sequence of `heads` heads."""
        everything = slice(None)
        rank = self.group.rank
        rows = []
        for part in layout._ranges[rank]:
            rows.append(slice(part.start, part.start + part.rows))
        gives = []
        takes = []
        for other, ranges in enumerate(layout._ranges):
            of_heads = slice(other * heads, (other + 1) * heads)
            gives.append([(everything, own_rows, of_heads) for own_rows in rows])
            positions = []
            for part in ranges:
                stop = part.first + part.stride * part.rows
                positions.append((everything, slice(part.first, stop, part.stride)))
            takes.append(positions)
        return all_to_all(rank, gives, takes)

    def _transfer(
        self, *parts: tuple[Array, Array, list[PartMove]], transposed: bool = False
    ) -> None:
        """Run transfers (x, y, moves) at the same time, or one after the other."""
        exchange = exchange_on(self._comm, arrays.device_of(parts[0][0]))
        transfers = (
            Transfer(exchange, moves, x, y, transposed=transposed) for x, y, moves in parts
        )
        for transfer in transfers if self.options.rotation == "sendrecv" else [*transfers]:
            transfer.finish()
            self.bytes_sent += transfer.bytes_sent


def _empty(shape: Shape, like: Array) -> Array:
    return arrays.empty(shape, like.dtype, arrays.device_of(like))
