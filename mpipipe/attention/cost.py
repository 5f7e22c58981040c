"""What ring attention costs: bytes sent, and when transfers are hidden.

Pure arithmetic, to plan with and to check measurements against. N is the size of the ring, s the
local length of the sequence, g the number of query heads to a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpipipe.attention.layout import Layout, ring_hops
from mpipipe.errors import ArgumentError

__all__ = ["ring_cost"]
__dir__ = __all__.copy

BACKWARD_WORK = 2.5  # matrix products of the backward over those of the forward: five against two


def kv_bytes(
    length: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    batch: int = 1,
    itemsize: int = 4,
) -> int:
    """Return the bytes of keys and values: batch s kv_heads (head_dim + value_dim) itemsize.

    `value_dim` defaults to `head_dim`. For the gradients dK and dV, `itemsize` is that of the
    accumulator.
    """
    return batch * length * kv_heads * (head_dim + (value_dim or head_dim)) * itemsize


def sent_forward(blocks: Sequence[int], rank: int, steps: int | None = None) -> int:
    """Return the bytes that `rank` sends in a forward of `attention.Ring`.

    They are N - 1 blocks: (N - 1) kv_bytes if shards are even.

    `blocks` are the `kv_bytes` of each rank, `steps` the ring steps (`Layout.steps`: fewer than N
    with a window), by default N. In every step t but the last, the rank passes on the block of rank
    - t.
    """
    return sum(_messages(blocks, blocks, rank, steps or len(blocks), backward=False))


def sent_backward(
    blocks: Sequence[int],
    rank: int,
    steps: int | None = None,
    gradients: Sequence[int] | None = None,
) -> int:
    """Bytes that `rank` sends in the backward of `attention.Ring`; arguments as for `sent_forward`.

    `gradients` are the bytes of dK and dV of each rank, by default those of K and V. In half
    precision they are twice as many, since gradients travel in float32.

    Blocks come in the order rank - (N - 1), ..., rank - 1, rank. The rank passes on K and V of all
    but the last two, by N - 2 hops (the last is at home), and dK and dV of all but the last, by
    N - 1 hops. That makes (2 N - 3) kv_bytes if shards are even, and none for a rank alone.
    """
    return sum(_messages(blocks, gradients or blocks, rank, steps or len(blocks), backward=True))


def _messages(
    blocks: Sequence[int], gradients: Sequence[int], rank: int, steps: int, backward: bool
) -> list[int]:
    """Bytes that a rank sends in each step."""
    last = steps - 1 - backward  # step in which keys and values need not go on
    sizes = []
    for step, *_, owner in ring_hops(rank, len(blocks), steps, backward):
        size = 0
        if step < last:
            size += blocks[owner]
        if backward and step > 0:
            size += gradients[owner - 1]
        sizes.append(size)
    return sizes


def hiding_length_forward(
    flops: float, bandwidth: float, group: int = 1, itemsize: int = 4, causal: bool = True
) -> float:
    """The shortest local length at which the computation of a forward hides its transfers.

    `flops` is the rate of the kernel, in operations a second, `bandwidth` that of one direction of
    the link, in bytes a second. A causal step (with balanced shards: half a block) computes for 2
    s^2 heads dim / flops seconds, and sends a block in 2 s kv_heads dim itemsize / bandwidth
    seconds. The first is as long as the second at s = itemsize flops / (g bandwidth). Without the
    causal mask half that length is enough. A backward computes BACKWARD_WORK times as much and
    sends dK and dV too: 2 / BACKWARD_WORK of that length hides it in float32.
    """
    return itemsize * flops / (group * bandwidth) / (1 if causal else 2)


def attention_flops(pairs: float, heads: int, head_dim: int) -> float:
    """Return the operations of a forward: 4 pairs heads dim.

    They are two products over the (query, key) pairs that see each other.

    Causal attention has S^2 / 2 pairs, as the literature counts. A backward has BACKWARD_WORK times
    as many operations.
    """
    return 4 * pairs * heads * head_dim


def slice_lengths(
    seq_len: int,
    slices: int,
    width: float = 0.0,
    parameters: float | None = None,
    window: int | None = None,
    unit: int = 1,
) -> tuple[int, ...]:
    """Cut a causal sequence into slices that take equal time, in a forward and a backward together.

    A position at t sees t + 1 keys, so later slices are shorter. Beside attention it has 2
    operations for each entry of a matrix, and twice as many in the backward: a slice of positions a
    ... b - 1 costs, in operations,

        6 parameters (b - a) + 14 width sum over t = a ... b - 1 of min(t + 1, window)

    (Sun et al., "Seq1F1B", 2024, arXiv:2406.03488).

    Parameters
    ----------
    seq_len, slices : int
        Positions, and number of slices, n.
    width : float
        heads head_dim: of one layer, or of all that attend. 0: all slices are of the same length.
    parameters : float, optional
        Entries of the matrices that a position is multiplied with, of the same layers; by default
        12 width^2, those of a GPT's layer.
    window : int, optional
        As for `Local`.
    unit : int
        Lengths are multiples of it, but for a rest in the last one: 2 N lets zigzag shards of N
        ranks be equal, and products of a multiple of 32 rows take a few percent less time on CPUs.

    Returns
    -------
    tuple of int
        n lengths of at least `unit`, none longer than the one before it but for that rest; seq_len
        in all.

    Examples
    --------
    >>> from mpipipe.attention import slice_lengths
    >>> slice_lengths(4096, 4), slice_lengths(4096, 4, width=256)
    ((1024, 1024, 1024, 1024), (1620, 1002, 795, 679))
    """
    least = min(slices, unit, 1 if window is None else window)
    if least < 1 or slices * unit > seq_len or min(width, parameters or 0) < 0:
        raise ArgumentError(
            "a sequence cannot be cut into these slices",
            found=f"{seq_len=}, {slices=}, {unit=}, {window=}, {width=}, {parameters=}",
            expected="at least `unit` positions for each slice, and no negative number",
            remedy="fewer slices, or a longer sequence",
        )
    rest = 12.0 * width**2
    if parameters is not None:
        rest = parameters
    ends = unit * np.arange(seq_len // unit + 1, dtype=np.float64)  # places at which slices may end
    full = np.minimum(ends, window or seq_len)
    pairs = full * (full + 1) / 2 + (ends - full) * full
    costs = ends
    if rest or width:
        costs = 6 * rest * ends + 4 * (1 + BACKWARD_WORK) * width * pairs
    cuts = []
    for part in range(slices + 1):
        cuts.append(int(np.abs(costs - costs[-1] * part / slices).argmin()))
    for part in range(1, slices):  # each has one unit or more
        cuts[part] = min(max(cuts[part], cuts[part - 1] + 1), len(ends) - 1 - slices + part)
    *lengths, last = sorted((unit * (stop - start) for start, stop in pairwise(cuts)), reverse=True)
    return *lengths, last + seq_len % unit


class RingCost(NamedTuple):
    """Cost of forwards, or backwards, of rings: bytes and seconds of the busiest ranks.

    Attributes
    ----------
    sent : int
        Bytes that a rank sends.
    sending, computing : float
        Seconds that its messages take, and its computation.
    seconds : float
        From the common begin of the ranks until the last of them is done, where messages travel
        during computation.
    """

    sent: int
    sending: float
    computing: float
    seconds: float


def ring_cost(
    layout: Layout,
    *,
    flops: float,
    bandwidth: float,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    layers: int = 1,
    batch: int = 1,
    itemsize: int = 4,
    causal: bool = True,
    window: int | None = None,
    latency: float = 0.0,
) -> tuple[RingCost, RingCost]:
    """Predict the forwards and backwards of `layers` layers of attention on a ring.

    Parameters
    ----------
    layout, causal, window : Layout, bool, int
        As for `attention.Ring`.
    flops, bandwidth : float
        As for `hiding_length_forward`. Where messages of a step share a network card, such as those
        of several rings that leave a node over it, give its bandwidth divided by their number.
    latency : float
        Seconds from the end of a message until it is there.
    heads, head_dim, kv_heads, layers, batch, itemsize : int
        Sizes; by default each head of queries has its own of keys. Gradients travel in at least 4
        bytes each.

    Returns
    -------
    forward, backward : RingCost
        Of all layers. A step begins on a rank when the one before it is computed, its message sent
        and its block there.

    Examples
    --------
    >>> from mpipipe.attention import Layout, cost
    >>> layout = Layout("zigzag", ranks=2, seq_len=2048)
    >>> sizes = {"heads": 4, "head_dim": 64, "layers": 24}
    >>> forward, _ = cost.ring_cost(layout, flops=1e11, bandwidth=4e9, **sizes)
    >>> forward.sent >> 20, forward.sending < forward.computing == forward.seconds
    (48, True)
    """
    shape = kv_heads or heads, head_dim, None, batch
    lengths = [*map(layout.length, range(layout.ranks))]
    blocks = [kv_bytes(length, *shape, itemsize) for length in lengths]
    gradients = [kv_bytes(length, *shape, max(4, itemsize)) for length in lengths]
    costs = []
    for backward in (False, True):
        tables = []
        sizes = []
        for rank in range(layout.ranks):
            table = layout.table(rank, causal, window, backward=backward)
            tables.append(table)
            sizes.append(_messages(blocks, gradients, rank, len(table), backward))
        rate = flops
        if backward:
            rate = flops / BACKWARD_WORK
        computing = [0.0] * layout.ranks
        done = [0.0] * layout.ranks
        for step, rows in enumerate(zip(*tables)):
            sent_at = []
            for begin, size in zip(done, sizes):
                sent_at.append(begin + size[step] / bandwidth)
            for rank, row in enumerate(rows):
                seconds = attention_flops(batch * row.pairs, heads, head_dim) / rate
                arrival = 0.0
                if row.receive_from is not None:
                    arrival = sent_at[row.receive_from] + latency
                computing[rank] += seconds
                done[rank] = max(done[rank] + seconds, sent_at[rank], arrival)
        sent = layers * max(map(sum, sizes))
        seconds = layers * max(computing)
        costs.append(RingCost(sent, sent / bandwidth, seconds, layers * max(done)))
    return costs[0], costs[1]
