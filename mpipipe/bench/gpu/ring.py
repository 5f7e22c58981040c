"""A ring whose ranks take turns on one GPU: what blocks and merging cost beside one kernel over the whole sequence.

Every rank computes all steps of its forward and its backward as attention.Ring does, with all blocks at hand. The sum
of the ranks' times holds all computation and merging of the ring, and no messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpipipe import arrays, attention
from mpipipe.arrays import DeviceArray
from mpipipe.attention import kernels, mask
from mpipipe.attention.kernels import Block, Result
from mpipipe.attention.kernels.interface import cast, strided_add, strided_copy
from mpipipe.bench.gpu.rows import Row, normal, seconds

QUICK = dict(repeats=2, ranks=4, length=4096)


def measure(
    repeats: int = 3,
    ranks: int = 8,
    length: int = 8192,
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
) -> Iterator[Row]:
    """Yield the time of one kernel over the sum of the ranks' times, forward and both ways, and the ranks' balance."""
    counts = (heads, kv_heads, kv_heads, heads)
    whole = [normal((1, ranks * length, n, head_dim), dtype, seed) for seed, n in enumerate(counts)]
    forward, backward = _alone(repeats, whole)
    ring = [_Rank(rank, ranks, length, whole) for rank in range(ranks)]
    forwards = [seconds(rank.forward, repeats, 1) for rank in ring]
    backwards = [seconds(rank.backward, repeats, 1) for rank in ring]
    what = f"{dtype}, virtual ring of {ranks} x {length}, zigzag"
    yield Row(f"one kernel over the ranks' sum, forward, {what}", forward / sum(forwards), "", goal="at least 0.92")
    both = (forward + backward) / (sum(forwards) + sum(backwards))
    yield Row(f"one kernel over the ranks' sum, forward and backward, {what}", both, "", goal="at least 0.94")
    slowest = max(one + other for one, other in zip(forwards, backwards))
    mean = (sum(forwards) + sum(backwards)) / ranks
    yield Row(f"mean rank over the slowest, {what}", mean / slowest, "", goal="at least 0.95")


def _alone(repeats: int, whole: Sequence[DeviceArray]) -> tuple[float, float]:
    """Return the seconds of forward and backward of one kernel over the whole sequence."""
    *inputs, dout = whole
    attend = attention.Local(causal=True)
    forward = seconds(lambda: attend.forward(*inputs), repeats, 1)
    saved = attend.forward(*inputs)[1]
    return forward, seconds(lambda: attend.backward(dout, saved), repeats, 1)


class _Rank:
    """The computation of one rank of a causal ring.

    rank, ranks, length : its place, and the local length
    whole : q, k, v and dout of the whole sequence; any values do, so shards are consecutive pieces
    """

    def __init__(self, rank: int, ranks: int, length: int, whole: Sequence[DeviceArray]) -> None:
        layout = attention.Layout("zigzag", ranks, ranks * length)
        pieces = [[array[:, start * length : (start + 1) * length] for start in range(ranks)] for array in whole]
        self.q, self.dout = pieces[0][rank], pieces[3][rank]
        order = [(rank - step) % ranks for step in range(ranks)]
        self.steps = [(pieces[1][block], pieces[2][block], layout.needs(rank, block)) for block in order]
        own = self.steps[0]
        self.kernel = kernels.chosen(self.q, *own[:2])
        self.scale, self.kind = self.q.shape[3] ** -0.5, arrays.accumulator(self.q.dtype)
        self.overwrite = mask.each_row_once(own[2], length)
        self.message = [arrays.empty_like(x) for x in own[:2]]
        self.received = [arrays.empty_like(x, self.kind) for x in own[:2]]

    def forward(self) -> None:
        """Run all steps, and keep the result for the backward."""
        for place, x in zip(self.message, self.steps[0][:2]):
            strided_copy(place, x)
        result = self.kernel.make_accumulator(self.q, self.steps[0][1], self.overwrite)
        for k, v, slices in self.steps:
            result.attend(Block(self.q, k, v, self.scale, slices))
        self.out, self.lse = result.end()

    def backward(self) -> list[DeviceArray]:
        """Run all steps, and return dq, and dk and dv summed over all blocks.

        In a ring the gradients of keys and values would travel on; here they are summed over this rank's steps.
        """
        dq = arrays.zeros(self.q.shape, self.kind, "cuda")
        for step, (k, v, slices) in enumerate(reversed(self.steps)):
            block = Block(self.q, k, v, self.scale, slices)
            own = self.kernel.block_gradients(block, self.dout, Result(self.out, self.lse), dq)
            for sums, part in zip(self.received, own):
                (strided_add if step > 0 else strided_copy)(sums, part)
        return [cast(x, self.q.dtype) for x in (dq, *self.received)]
