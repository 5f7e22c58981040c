"""Which MPI tag a message travels under: one function, used by both ends.

A message is named by the edge between two neighbouring logical stages, the micro-batch, the
direction (activation forward, gradient backward) and the part (header, data). Edge e joins stage
e-1 to stage e. Behind these S-1 edges of the chain come the skips: edge S+i joins the two stages of
skip i, of S stages. The edges that one pair of ranks shares are counted 0, 1, ..., so that the code

    code = ((edge index * M + micro-batch) * 2 + direction) * 2 + part

is the same at both ends and unique on that pair. (The number of the chunk is not the same at both
ends: it differs by one where the pipeline wraps around.) MPI promises tags up to 32 767 only. Codes
above TAG_UB go to further communicators, called channels: (channel, tag) = divmod(code, TAG_UB +
1). Nothing is ever truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FORWARD = 0
BACKWARD = 1
HEADER = 0
DATA = 1


class Tags:
    """Tags of one pipeline, which need `channels` communicators whose largest tag is `tag_ub`.

    `placement` is the rank of each logical stage, and `skips` are the two stages of each skip.
    """

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        tag_ub: int,
        skips: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.microbatches = microbatches
        self.base = tag_ub + 1
        # edge between different ranks -> how many before it join the same two ranks
        self.index: dict[int, int] = {}
        counts: dict[tuple[int, int], int] = {}
        for edge, (source, target) in enumerate([*pairwise(range(len(placement))), *skips], 1):
            low, high = sorted((placement[source], placement[target]))
            if low != high:
                self.index[edge] = counts.get((low, high), 0)
                counts[low, high] = self.index[edge] + 1
        edges = max(self.index.values(), default=-1) + 1
        self.channels = max(1, -(-edges * microbatches * 4 // self.base))

    def of(self, edge: int, microbatch: int, direction: int, part: int) -> tuple[int, int]:
        """(channel, tag) of one message; the two stages of the edge lie on different ranks."""
        code = ((self.index[edge] * self.microbatches + microbatch) * 2 + direction) * 2 + part
        return divmod(code, self.base)
